"""The errors of a session with parameter servers."""

from __future__ import annotations

from farandole.comm.errors import CommunicationError


class ServerLost(CommunicationError):
    """A server died, left or does not answer, so its part of the parameters is lost."""


class AllWorkersLost(CommunicationError):
    """All workers are lost."""
