"""Elastic programs: state that is committed now and then, and a function that starts again from it.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

When a rank dies, an operation of the others raises `HorovodInternalError`; they go back to the last commit, form a
smaller world (see `reform`), and call the function again.
"""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Callable, Iterable
from typing import Any

from farandole.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt, MismatchError


class State:
    """What a program must not lose.  Subclasses say how it is saved, restored and made equal on all ranks.

    bcast_object: sends an object of rank 0 to all.  get_rank: tells this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, bool]] = queue.SimpleQueue()
        self._last_update = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Functions to call when the world has changed: to scale the learning rate, for instance."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called in the new world, before the state is made equal."""
        while not self._host_messages.empty():
            self._host_messages.get()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """Tell the state that hosts have changed; at its next commit all ranks start anew.

        timestamp: that of the change; later ones count.  update_res: as in Horovod, 1 if hosts were only removed,
        so that the state need not be broadcast.
        """
        self._host_messages.put((timestamp, update_res == 1))

    def commit(self) -> None:
        """Save the state, and start anew if hosts have changed: a collective operation."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks if rank 0 was told of a change: a collective operation."""
        latest, only_removed = self._last_update, True
        while not self._host_messages.empty():
            timestamp, removed = self._host_messages.get()
            if timestamp > self._last_update:
                latest, only_removed = max(latest, timestamp), only_removed and removed
        before = self._last_update
        self._last_update, only_removed = self._bcast_object((latest, only_removed))
        if self._last_update > before:
            raise HostsUpdatedInterrupt(only_removed)

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over the state of rank 0: a collective operation."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a changed world."""


class ObjectState(State):
    """State of Python objects: each keyword argument is an attribute, saved as a deep copy."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        self._set_attributes()

    def save(self) -> None:
        """Keep a copy of the attributes in memory."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Go back to the copy."""
        self._set_attributes()

    def sync(self) -> None:
        """Take over the attributes of rank 0, as they are now."""
        if self._saved_state:
            current = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = self._bcast_object(current)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)


def run_with(
    function: Callable[..., Any], reset: Callable[[], None], begin: Callable[[], None]
) -> Callable[..., Any]:
    """A function of a state that is called again, after `reset`, whenever the world has changed.

    begin: called once before, with the ranks all there.  A `MismatchError` is let through: it would come again.
    """

    @functools.wraps(function)
    def elastic(state: State, *arguments: Any, **keywords: Any) -> Any:
        begin()
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return function(state, *arguments, **keywords)
            except MismatchError:
                raise
            except HorovodInternalError:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            reset()
            state.on_reset()

    return elastic
