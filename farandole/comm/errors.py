"""Exceptions for failures between ranks; each names the rank and the call.

All are `CommunicationError`s, which are `RuntimeError`s like torch's own errors.
"""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """A collective could not be completed; the message names the rank, its process and both calls."""


class RankDied(CommunicationError):
    """The process of a rank ended without leaving its groups: killed, crashed or out of memory."""


class RankLeft(CommunicationError):
    """A rank ended or destroyed the group while other ranks wait for it."""


class RankLate(CommunicationError):
    """A rank did not arrive within the timeout of the call."""


class CallMismatch(CommunicationError):
    """Ranks made different calls at the same position: another operation, shape, type or root."""
