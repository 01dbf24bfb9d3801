"""The error for unusable data."""

from __future__ import annotations


class DataError(ValueError):
    """The data cannot be used; the message describes the expected and the found data in one line."""
