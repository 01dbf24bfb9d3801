"""How a session with parameter servers can fail."""

from __future__ import annotations

from farandole.comm.errors import CommunicationError


class ServerLost(CommunicationError):
    """A server died, left or does not answer, and its part of the parameters is gone with it."""


class AllWorkersLost(CommunicationError):
    """No worker is left to train."""
