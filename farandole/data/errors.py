"""What can be wrong with data, said in one line for the person who asked for it."""

from __future__ import annotations


class DataError(ValueError):
    """The data asked for cannot be used; the message says what was asked, found, and would work."""
