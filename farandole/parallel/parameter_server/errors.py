"""The errors of a session with parameter servers."""

from __future__ import annotations

from farandole.comm.errors import CommunicationError


class ServerLost(CommunicationError):
    """Raised if a server died, left or does not respond; its part of the parameters is then lost."""


class AllWorkersLost(CommunicationError):
    """Raised on a server if all workers are lost."""
