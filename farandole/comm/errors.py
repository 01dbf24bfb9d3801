"""Exceptions for communication failures.

All are subclasses of `CommunicationError`, which is a `RuntimeError` like torch's own errors.
"""

from __future__ import annotations

from farandole._troubleshooting import Documented


class CommunicationError(Documented, RuntimeError):
    """A collective or a message failed; the error message names the rank, its process and its call."""


class RankDied(CommunicationError):
    """A rank's process ended without leaving its groups: it was killed, crashed or ran out of memory."""

    _section = "rankdied"


class RankLeft(CommunicationError):
    """A rank ended normally or destroyed the group while other ranks were waiting for it."""

    _section = "rankleft"


class RankLate(CommunicationError):
    """A rank did not make the call before the timeout expired."""

    _section = "ranklate"


class CallMismatch(CommunicationError):
    """Ranks made calls that do not match: their operations, shapes, types or roots differ."""

    _section = "callmismatch"
