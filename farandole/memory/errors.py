"""What goes wrong where state is kept, said in one line."""

from __future__ import annotations


class OffloadError(RuntimeError):
    """State cannot be kept, read or written where it was asked; the message says what, where and why."""


class NoSpace(OffloadError):
    """A file system has less room than the state needs."""


class SwapError(RuntimeError):
    """Activations cannot be moved away or back; the message says where to and why."""
