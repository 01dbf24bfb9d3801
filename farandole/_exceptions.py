"""Convert an exception to its message."""

from __future__ import annotations


def message_of(error: BaseException) -> str:
    """Return `str(error)`, or a placeholder if the exception cannot be converted to a string."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"
