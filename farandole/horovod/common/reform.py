"""Forming a new world of the ranks that are left when others have died.

The survivors meet through the store of the first world, which rank 0's process (or the launcher) keeps.  One of
them, whoever comes first, waits until each rank of the old world has come or its process has ended, and writes down
who is there; these are the new world, in the old order.  Deaths are seen as the kernel reports them, so that all ranks
must be on one host.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from farandole.comm.host import host_identity
from farandole.horovod.common.exceptions import HorovodInternalError

TIMEOUT_S = 600.0
"""How long the survivors wait for a rank that lives and does not come; HOROVOD_ELASTIC_TIMEOUT says otherwise."""

_LOOK_S = 0.02


class World:
    """The ranks of a world that may be formed anew; made by all of them while they live.

    store: outlives the world.  generation: how often it was formed.
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
        """Meet the others that live; their ranks in this world.  `HorovodInternalError` where that cannot be."""
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
        """Let go of the processes."""
        while self._processes:
            os.close(self._processes.pop())

    def _wait_for_each(self, timeout_s: float) -> list[int]:
        """The ranks that have come, once each has come or died."""
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
    """Whether the process of this descriptor has ended, also where nobody has asked for its status yet."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def form(world: World, members: Sequence[int], generation: int, timeout_s: float) -> None:
    """Make torch's default group of the surviving members of a world."""
    dist.init_process_group(
        world.backend,
        store=dist.PrefixStore(f"farandole/elastic/{generation}/world", world.store),
        rank=members.index(world.rank),
        world_size=len(members),
        timeout=timedelta(seconds=timeout_s),
    )
