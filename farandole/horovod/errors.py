"""Horovod's exceptions."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """Raised if an operation fails because ranks disagree, a rank died, or Horovod was shut down.

    `hvd.elastic.run` catches this error, restores the last commit and continues.
    """


class MismatchError(HorovodInternalError):
    """Raised if ranks submit different operations under the same name.

    `hvd.elastic.run` does not catch this error, because it would recur after a restart.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Raised if the hosts change.  `hvd.elastic.run` calls the training function again with the current state.

    Args:
        skip_sync: Whether to skip the broadcast of the state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


def not_initialized() -> ValueError:
    """Return the error to raise for calls before `hvd.init()`."""
    return ValueError(NOT_INITIALIZED)
