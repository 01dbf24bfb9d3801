"""Exceptions for communication failures.

All are subclasses of `CommunicationError`, which is a `RuntimeError` like torch's own errors.
"""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """Raised if a collective or a message fails; the error message names the rank, its process and its call."""


class RankDied(CommunicationError):
    """Raised if a rank's process ended without leaving its groups: it was killed, crashed or ran out of memory."""


class RankLeft(CommunicationError):
    """Raised if a rank ended normally or destroyed the group while other ranks were waiting for this rank."""


class RankLate(CommunicationError):
    """Raised if a rank did not make the call before the timeout expired."""


class CallMismatch(CommunicationError):
    """Raised if ranks made calls with different operations, shapes, types or roots."""
