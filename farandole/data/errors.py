"""The error for unusable data."""

from __future__ import annotations


class DataError(ValueError):
    """The data cannot be used; the message says what was expected and found, in one line."""
