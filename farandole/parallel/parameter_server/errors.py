"""The errors of a session with parameter servers."""

from __future__ import annotations

from farandole.comm.errors import CommunicationError


class ServerLost(CommunicationError):
    """Raised if a server has died, left or stopped responding.

    The parameters on this server are lost.
    """


class AllWorkersLost(CommunicationError):
    """Raised on a server if all workers are lost."""
