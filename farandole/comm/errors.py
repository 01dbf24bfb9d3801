"""What goes wrong between ranks, as exceptions that say who and in which call.

All of them are `CommunicationError`s, which are `RuntimeError`s, as torch's own are.
"""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """A collective could not be completed; the message names the rank, its process and both calls."""


class RankDied(CommunicationError):
    """The process of a rank ended without leaving its groups: killed, crashed or out of memory."""


class RankLeft(CommunicationError):
    """A rank ended, or destroyed the group, while others still wait for it."""


class RankLate(CommunicationError):
    """A rank did not arrive within the deadline of the call."""


class CallMismatch(CommunicationError):
    """Ranks made different calls at the same place: operation, shape, type or root."""
