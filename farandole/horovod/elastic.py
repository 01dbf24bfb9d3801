"""Elastic training, experimental: commit a state, and continue from the last commit on the surviving ranks.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

When a rank dies, operations on the other ranks raise `HorovodInternalError`.  The survivors restore the last commit,
form a smaller world, and call the function again.

The limits: ranks can leave but not join, no host is discovered, all ranks must be on one host, and the launcher must
not stop the job when a rank fails (`farandole launch` and torchrun do).

The survivors meet through the store of the first world, which the process of rank 0 or the launcher keeps.  The first
survivor waits until each rank of the old world has arrived or its process has ended, and publishes the ranks that
arrived.  These ranks form the new world, in the old order.  The kernel reports which processes have ended.
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
from farandole.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, MismatchError


class State:
    """The state of a program.  Subclasses define how the state is saved, restored and broadcast.

    Args:
        bcast_object: A function that sends an object of rank 0 to all ranks.
        get_rank: A function that returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, bool]] = queue.SimpleQueue()
        self._last_update = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to call when the world has changed, for example to scale the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the new world, before the state is broadcast."""
        while not self._host_messages.empty():
            self._host_messages.get()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """Report that hosts have changed; at the next commit all ranks restart the function.

        Args:
            timestamp: The time of the change; a change is ignored if a later change was handled.
            update_res: 1 if hosts were only removed, so that the state need not be broadcast.
        """
        self._host_messages.put((timestamp, update_res == 1))

    def commit(self) -> None:
        """Save the state, and restart the function if hosts have changed.  All ranks call it."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks if a change was reported on rank 0.  All ranks call it."""
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
        """Restore the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast the state of rank 0.  All ranks call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a changed world."""


class ObjectState(State):
    """A state of Python objects: each keyword argument is an attribute and is saved as a deep copy."""

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
        """Restore the copy."""
        self._set_attributes()

    def sync(self) -> None:
        """Broadcast the attributes of rank 0."""
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
    """Return a function that calls `function` again, after `reset`, when the world has changed.

    `begin` is called once, while all ranks live.  A `MismatchError` is raised, because it would occur again.
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
"""How long the survivors wait for a rank that lives and does not come; HOROVOD_ELASTIC_TIMEOUT says otherwise."""

_LOOK_S = 0.02


class World:
    """The ranks of a world that can be formed again; all ranks construct it while they live.

    Args:
        store: A store that outlives the world.
        rank: This process's rank.
        size: The number of ranks.
        generation: How often the world was formed.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, generation: int) -> None:
        self.store, self.rank, self.size, self.generation = store, rank, size, generation
        self.backend = dist.get_backend()
        self._corner = dist.PrefixStore(f"farandole/elastic/{generation}", store)
        self._corner.set(f"who/{rank}", json.dumps([os.getpid(), host_identity()]))
        everyone = [json.loads(self._corner.get(f"who/{other}")) for other in range(size)]
        self._one_host = len({host for _, host in everyone}) == 1
        self._processes = [os.pidfd_open(pid) for pid, _ in everyone] if self._one_host else []

    def survivors(self) -> list[int]:
        """Wait for the other survivors; return the survivors' ranks, or raise `HorovodInternalError`."""
        if not self._one_host:
            raise HorovodInternalError(
                "the ranks are on several hosts, where the death of one cannot be told from its being late; "
                "have the launcher restart the job (torchrun --max-restarts) and load a checkpoint"
            )
        timeout_s = float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", TIMEOUT_S))
        try:
            self._corner.set(f"here/{self.rank}", "")
            if self._corner.add("first", 1) == 1:
                self._corner.set("members", json.dumps(self._wait_for_each(timeout_s)))
            self._corner.wait(["members"], timedelta(seconds=timeout_s + 5))
            members: list[int] = json.loads(self._corner.get("members"))
        except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
            if isinstance(error, HorovodInternalError):
                raise
            raise HorovodInternalError(
                f"the surviving ranks could not meet: {error}. The store through which they meet ended with the "
                f"process that kept it (rank 0's, where no launcher keeps one); restart the job and load a checkpoint"
            ) from error
        if self.rank not in members:
            raise HorovodInternalError(
                f"rank {self.rank} came too late: ranks {members} have gone on without it"
            )
        return members

    def close(self) -> None:
        """Close the descriptors of the processes."""
        while self._processes:
            os.close(self._processes.pop())

    def _wait_for_each(self, timeout_s: float) -> list[int]:
        """Wait until each rank has arrived or died; return the ranks that have arrived."""
        deadline = time.monotonic() + timeout_s
        open_ranks, members = set(range(self.size)), []
        while open_ranks:
            for rank in sorted(open_ranks):
                if self._corner.check([f"here/{rank}"]):
                    members.append(rank)
                    open_ranks.discard(rank)
                elif _has_ended(self._processes[rank]):
                    open_ranks.discard(rank)
            if open_ranks and time.monotonic() > deadline:
                raise HorovodInternalError(
                    f"ranks {sorted(open_ranks)} live and did not come within {timeout_s:g} s to form a new world "
                    f"(HOROVOD_ELASTIC_TIMEOUT); those that came: {sorted(members)}"
                )
            time.sleep(_LOOK_S)
        return sorted(members)


def _has_ended(process: int) -> bool:
    """Return whether the process of this descriptor has ended, also before its parent has waited for it."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def form(world: World, members: Sequence[int], generation: int, timeout_s: float) -> None:
    """Initialize torch's default group with the surviving members of a world."""
    dist.init_process_group(
        world.backend,
        store=dist.PrefixStore(f"farandole/elastic/{generation}/world", world.store),
        rank=members.index(world.rank),
        world_size=len(members),
        timeout=timedelta(seconds=timeout_s),
    )
