"""The exceptions of Horovod, by Horovod's names."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks disagree, a rank died, or Horovod was shut down.

    An elastic program (`hvd.elastic.run`) restores its last commit and continues.
    """


class MismatchError(HorovodInternalError):
    """Ranks asked for different things under one name.

    `hvd.elastic.run` does not catch this error, because a restart would repeat it.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed: an elastic program restarts with its current state.

    Args:
        skip_sync: Whether the state need not be broadcast after the restart.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


def not_initialized() -> ValueError:
    """Return the error that every call before `hvd.init()` raises."""
    return ValueError(NOT_INITIALIZED)
