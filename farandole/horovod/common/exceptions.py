"""The exceptions of Horovod, by Horovod's names."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation could not be carried out: ranks disagree, a rank died, or Horovod was shut down.

    An elastic program (`hvd.elastic.run`) answers it by going back to what it last committed.
    """


class MismatchError(HorovodInternalError):
    """Ranks asked for different things under one name.

    A mistake in the program that starting anew would only repeat, so that `hvd.elastic.run` lets it pass.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed: an elastic program starts again with the state that it has.

    skip_sync: whether the state need not be broadcast afterwards.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


def not_initialized() -> ValueError:
    """What every call before `hvd.init()` raises."""
    return ValueError(NOT_INITIALIZED)
