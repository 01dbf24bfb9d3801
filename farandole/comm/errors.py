"""Exceptions for communication failures.

All are subclasses of `CommunicationError`, which is a `RuntimeError` like torch's own errors.
"""

from __future__ import annotations

from farandole._troubleshooting import Documented


class CommunicationError(Documented, RuntimeError):
    """Raised if a collective or a message fails.

    The error message names the responsible rank, its process and its call.
    """


class RankDied(CommunicationError):
    """Raised if a rank's process ended without leaving its groups, for example because it was killed or crashed.

    Also raised if the connection to the rank was lost, or the rank's host did not respond.
    """

    _section = "rankdied"


class RankLeft(CommunicationError):
    """Raised if a rank's program ended, or a rank destroyed the group, while other ranks were waiting for that rank."""

    _section = "rankleft"


class RankLate(CommunicationError):
    """Raised if the timeout expired before a rank made a call for which other ranks were waiting."""

    _section = "ranklate"


class CallMismatch(CommunicationError):
    """Raised if ranks made calls with different operations, reductions, sizes, dtypes or roots."""

    _section = "callmismatch"
