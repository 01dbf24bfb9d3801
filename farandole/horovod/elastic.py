"""Elastic training (experimental): continue from the last committed state on the surviving ranks.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

When a rank dies, operations on the other ranks raise `HorovodInternalError`.  The survivors restore the last
commit, form a smaller world, and call the training function again.

Limitations:

- Ranks can leave a running job but cannot join it, and new hosts are not discovered.
- All ranks must be on one host.
- The launcher must not stop the job when a rank fails.  `farandole launch` and torchrun stop the job.

The survivors rendezvous through the first world's store, which rank 0 or the launcher hosts.  The first survivor
to arrive waits until each rank in the old world has either arrived or ended, and then publishes the list of
arrived ranks.  These ranks form the new world, in the same order as in the old world.  Process file descriptors
(pidfds) detect ended processes.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import queue
import select
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farandole.comm.host import host_identity
from farandole.horovod.requests import HorovodInternalError, MismatchError


class HostsUpdatedInterrupt(RuntimeError):
    """Raised if the hosts change.  `hvd.elastic.run` calls the training function again with the current state.

    Args:
        skip_sync: Whether to skip the broadcast of the state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class State:
    """A training state.  Subclasses define how to save, restore and broadcast the state.

    Args:
        bcast_object: A function that broadcasts an object from rank 0 to all ranks.
        get_rank: A function that returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, bool]] = queue.SimpleQueue()
        self._last_update = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to call after the world changes, for example to scale the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Discard pending host changes, and call `reset` and the reset callbacks.

        `hvd.elastic.run` calls this method before `sync`.
        """
        while not self._host_messages.empty():
            self._host_messages.get()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """Report a host change.  All ranks restart the training function at the next commit.

        Args:
            timestamp: The time of the change.  The change is ignored if a later change was already handled.
            update_res: 1 if hosts were removed and none were added.  The state is then not broadcast.
        """
        self._host_messages.put((timestamp, update_res == 1))

    def commit(self) -> None:
        """Save the state, and restart the training function if hosts have changed.  All ranks must call this method."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` if rank 0 was notified of a host change.  All ranks must call this method."""
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
        """Save a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state from the saved copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast rank 0's state.  All ranks must call this method."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the state to a changed world.  The default implementation does nothing."""


class ObjectState(State):
    """A state that consists of Python objects.

    Args:
        bcast_object: A function that broadcasts an object from rank 0 to all ranks.
        get_rank: A function that returns this process's rank.
        kwargs: The attributes and their initial values.  `save` makes deep copies.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        self._set_attributes()

    def save(self) -> None:
        """Save a copy of the attributes in memory."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Restore the attributes from the saved copy."""
        self._set_attributes()

    def sync(self) -> None:
        """Broadcast rank 0's attributes to all ranks.  All ranks must call this method."""
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
    """Wrap `function` so that it is called again after each rank failure or host change.

    The wrapper does not retry after a `MismatchError`, because the mismatch would recur.

    Args:
        function: The training function, whose first argument is a `State`.
        reset: A function that forms the new world.
        begin: A function to call once, before the first call to `function`.
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


TIMEOUT_S = 600.0
"""The default value of HOROVOD_ELASTIC_TIMEOUT, the time in seconds that survivors wait for a live rank to arrive."""

_POLL_INTERVAL_S = 0.02


class World:
    """The ranks in a world, and the data that survivors need to form a new world.  All ranks must create a `World`.

    Args:
        store: A store that outlives the world.
        rank: This process's rank.
        size: The number of ranks.
        generation: The number of worlds formed before this one.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, generation: int) -> None:
        self.store, self.rank, self.size, self.generation = store, rank, size, generation
        self.backend = dist.get_backend()
        self._store = dist.PrefixStore(f"farandole/elastic/{generation}", store)
        self._store.set(f"who/{rank}", json.dumps([os.getpid(), host_identity()]))
        processes = [json.loads(self._store.get(f"who/{other}")) for other in range(size)]
        self._one_host = len({host for _, host in processes}) == 1
        self._processes = [os.pidfd_open(pid) for pid, _ in processes] if self._one_host else []

    def survivors(self) -> list[int]:
        """Wait for all survivors and return their ranks.

        Raises:
            HorovodInternalError: if the ranks are on several hosts, the store is unreachable, a live rank did not
                arrive within the timeout, or this rank arrived too late.
        """
        if not self._one_host:
            raise HorovodInternalError(
                "elastic training cannot continue on several hosts, because a dead rank on another host cannot be "
                "distinguished from a slow rank; let the launcher restart the job (torchrun --max-restarts) and "
                "load a checkpoint"
            )
        timeout_s = float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", TIMEOUT_S))
        try:
            self._store.set(f"here/{self.rank}", "")
            if self._store.add("first", 1) == 1:
                self._store.set("members", json.dumps(self._wait_for_each(timeout_s)))
            self._store.wait(["members"], timedelta(seconds=timeout_s + 5))
            members: list[int] = json.loads(self._store.get("members"))
        except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
            if isinstance(error, HorovodInternalError):
                raise
            raise HorovodInternalError(
                f"the rendezvous of the surviving ranks failed: {error}. The process that hosted the store (rank 0, "
                f"unless the launcher hosts the store) has probably ended; restart the job and load a checkpoint"
            ) from error
        if self.rank not in members:
            raise HorovodInternalError(
                f"rank {self.rank} arrived too late: ranks {members} have formed a new world; "
                f"increase HOROVOD_ELASTIC_TIMEOUT to wait longer for slow ranks"
            )
        return members

    def close(self) -> None:
        """Close the process file descriptors."""
        while self._processes:
            os.close(self._processes.pop())

    def _wait_for_each(self, timeout_s: float) -> list[int]:
        """Wait until each rank has arrived or died, and return the ranks that arrived."""
        deadline = time.monotonic() + timeout_s
        open_ranks, members = set(range(self.size)), []
        while open_ranks:
            for rank in sorted(open_ranks):
                if self._store.check([f"here/{rank}"]):
                    members.append(rank)
                    open_ranks.discard(rank)
                elif _has_ended(self._processes[rank]):
                    open_ranks.discard(rank)
            if open_ranks and time.monotonic() > deadline:
                raise HorovodInternalError(
                    f"ranks {sorted(open_ranks)} are alive, but did not arrive within {timeout_s:g} s to form a new "
                    f"world (arrived: {sorted(members)}); increase HOROVOD_ELASTIC_TIMEOUT to wait longer for "
                    "slow ranks"
                )
            time.sleep(_POLL_INTERVAL_S)
        return sorted(members)


def _has_ended(process: int) -> bool:
    """Return whether the process of a pidfd has ended; a zombie counts as ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def form(world: World, members: Sequence[int], generation: int, timeout_s: float) -> None:
    """Initialize torch's default process group with the surviving ranks of `world`.

    Args:
        world: The old world.
        members: The survivors' ranks in the old world.
        generation: The number of worlds formed before the new world.
        timeout_s: The timeout of the process group.
    """
    dist.init_process_group(
        world.backend,
        store=dist.PrefixStore(f"farandole/elastic/{generation}/world", world.store),
        rank=members.index(world.rank),
        world_size=len(members),
        timeout=timedelta(seconds=timeout_s),
    )
