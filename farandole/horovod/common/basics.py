"""The state of this process as a Horovod rank, and the calls that ask for it.

Horovod's interface is one per process by nature; all that it keeps between calls is the object `horovod` here.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from farandole.horovod.common.exceptions import HorovodInternalError, not_initialized
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.common.reform import World, form
from farandole.horovod.common.settings import Settings, unsupported
from farandole.horovod.engine.engine import Engine, Groups
from farandole.horovod.engine.requests import ALLGATHER, Request, Signature
from farandole.horovod.engine.timeline import Timeline
from farandole.launch.runtime import Runtime
from farandole.launch.runtime import init as join_job

_log = logging.getLogger("horovod")

TIMEOUT_S = 600.0
"""How long a collective, or a tensor that some ranks submitted, waits for other ranks; that of farandole.init()."""


Collect = Callable[[Request], Any]
"""Makes the result that a caller sees from a finished request."""


class Horovod:
    """This process: its place in the world, its process sets, and the requests that nobody has collected."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.timeline = Timeline()
        self.settings = Settings()
        self.handles: dict[int, tuple[Engine, Request, Collect]] = {}
        self._numbers = itertools.count(1)  # as in Horovod, whose scripts ask `if handle`
        self._sets: dict[int, ProcessSet] = {}
        self._world: list[int] = []  # ranks in torch's world
        self._groups: list[dist.ProcessGroup] = []
        self._local = (0, 1, 0, 1)
        self._homogeneous = True
        self._owns_world = False
        self._elastic: World | None = None
        self._generation = 0
        atexit.register(self.shutdown)

    # ---- beginning and end ----

    def init(self, comm: Any = None, process_sets: str | Iterable[ProcessSet] | None = None) -> None:
        """Join the job; the second call does nothing.

        comm: a list of ranks that form Horovod's world (each rank of it passes the same list), or an mpi4py
        communicator of them; all ranks if None.
        process_sets: sets to register at once, or "dynamic"; sets can be added later in either case.
        """
        if self.runtime is not None:
            if not self._world_is_gone():
                return
            self.shutdown()
        self.settings = Settings.read(os.environ)
        self._owns_world = not dist.is_initialized()
        runtime = join_job(timeout_s=TIMEOUT_S)
        self._world = self._chosen_ranks(comm, runtime)
        if runtime.rank not in self._world:
            raise ValueError(
                f"hvd.init(comm={self._world}) was called by rank {runtime.rank}, which is not in it"
            )
        self.runtime = runtime
        # runtime.close() is registered to run at the end; Horovod's threads must be at rest before it does
        atexit.unregister(self.shutdown)
        atexit.register(self.shutdown)
        if self.rank == 0:
            for sentence in unsupported(os.environ):
                _log.warning(sentence)
        self._register(global_process_set, list(range(len(self._world))), 0)
        self._find_neighbours(runtime)
        if self.settings.timeline not in ("", "DYNAMIC"):
            self.start_timeline(self.settings.timeline, self.settings.timeline_marks_cycles)
        if isinstance(process_sets, str):
            if process_sets != "dynamic":
                raise ValueError(f'process_sets is a list of ProcessSets or "dynamic", not {process_sets!r}')
        else:
            for process_set in process_sets or ():
                self.add_process_set(process_set)

    def shutdown(self) -> None:
        """Leave the job.  Operations in flight fail, on the other ranks too; without effect the second time."""
        if self.runtime is None:
            return
        gone, runtime, self.runtime = self._world_is_gone(), self.runtime, None
        for process_set in self._sets.values():
            if process_set.engine is not None:
                process_set.engine.close()
        self.timeline.stop()
        for process_set in self._sets.values():
            process_set.invalidate()
        self._sets.clear()
        self.handles.clear()
        while self._groups:
            group = self._groups.pop()
            if not gone:  # else the program has destroyed the world, and them with it
                dist.destroy_process_group(group)
        runtime.close()
        if self._owns_world and dist.is_initialized():
            # one that was formed anew, which the runtime only took over
            dist.destroy_process_group()

    def _world_is_gone(self) -> bool:
        """Whether the program has destroyed the world that it had when it called `init`."""
        return self.runtime is None or self.runtime.is_closed

    # ---- elastic programs ----

    def prepare_to_reform(self) -> None:
        """Have the ranks exchange what they need to form a new world when some have died."""
        runtime = self.joined()
        if self._elastic is not None or runtime.size == 1:
            return
        if not self._owns_world:
            raise HorovodInternalError(
                "hvd.elastic.run forms the world anew when ranks die, and cannot where the program has called "
                "torch.distributed.init_process_group itself: leave that to hvd.init()"
            )
        store = _get_default_store()
        self._elastic = World(store, runtime.rank, runtime.size, self._generation)

    def reform(self) -> None:
        """Leave the world and form one of the ranks that live; called by all of them."""
        self.joined()
        world, self._elastic = self._elastic, None
        self.shutdown()
        self._generation += 1
        if world is not None:
            members = world.survivors()
            world.close()
            form(world, members, self._generation, TIMEOUT_S)
        self.init()
        if world is not None:
            self._owns_world = True
            if self.size > 1:
                self._elastic = World(world.store, self.rank, self.size, self._generation)

    def _chosen_ranks(self, comm: Any, runtime: Runtime) -> list[int]:
        if comm is None or comm == []:
            return list(range(runtime.size))
        if hasattr(comm, "allgather"):
            comm = comm.allgather(runtime.rank)
        if not isinstance(comm, (list, tuple, range)) or any(not isinstance(rank, int) for rank in comm):
            raise ValueError(f"comm is a list of ranks or an mpi4py communicator, not {comm!r}")
        ranks = list(comm)
        if ranks != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < runtime.size:
            raise ValueError(f"comm={ranks} must be ascending ranks of the job's {runtime.size}, each once")
        return ranks

    # ---- who and where ----

    def joined(self) -> Runtime:
        """The runtime; ValueError before `init`."""
        if self.runtime is None:
            raise not_initialized()
        return self.runtime

    @property
    def rank(self) -> int:
        """This process's number in Horovod's world."""
        return self._world.index(self.joined().rank)

    @property
    def size(self) -> int:
        """How many ranks Horovod's world has."""
        self.joined()
        return len(self._world)

    @property
    def local(self) -> tuple[int, int, int, int]:
        """Local rank and size, cross rank and size."""
        self.joined()
        return self._local

    @property
    def homogeneous(self) -> bool:
        """Whether all hosts have equally many ranks."""
        self.joined()
        return self._homogeneous

    def _find_neighbours(self, runtime: Runtime) -> None:
        """Local numbers (among the ranks of a host) and cross numbers (among hosts, for one local rank)."""
        hosts: list[str] = [text.rstrip("\0") for text in self._gather_text(runtime.host)]
        mine, rank = hosts[self.rank], self.rank
        local_rank, local_size = hosts[:rank].count(mine), hosts.count(mine)
        if len(self._world) == runtime.size:
            local_rank, local_size = runtime.local_rank, runtime.local_size
        names = list(dict.fromkeys(hosts))
        peers = [name for name in names if hosts.count(name) > local_rank]
        self._local = (local_rank, local_size, peers.index(mine) if mine in peers else 0, max(1, len(peers)))
        self._homogeneous = len({hosts.count(name) for name in names}) == 1

    def _gather_text(self, text: str) -> list[str]:
        """Every rank's text, of at most 256 bytes."""
        data = torch.zeros(1, 256, dtype=torch.uint8)
        encoded = text.encode()[:256]
        data[0, : len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        return [row.numpy().tobytes().decode(errors="replace") for row in self._gather_rows(data)]

    def _gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """All-gather one row of each rank."""
        signature = Signature(ALLGATHER, (row.dtype,), (tuple(row.shape),))
        engine = global_process_set.member()
        request = Request(engine.name_for("init"), signature, [row])
        engine.submit(request)
        engine.wait(request)
        return request.outputs[0]

    # ---- process sets ----

    def add_process_set(self, process_set: ProcessSet | Iterable[int]) -> ProcessSet:
        """Register a process set; all ranks add the same sets in the same order.

        Raises:
            ValueError: The set is registered, another registered set has the same ranks, or ranks add different sets.
        """
        if not isinstance(process_set, ProcessSet):
            process_set = ProcessSet(process_set)
        size, ranks = self.size, process_set.ranks
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set} is registered already")
        if not ranks or not 0 <= ranks[0] <= ranks[-1] < size:
            raise ValueError(f"{process_set} needs ranks of the {size} that there are, and at least one")
        row = torch.zeros(1, size, dtype=torch.uint8)
        row[0, ranks] = 1
        chosen = [torch.nonzero(members).flatten().tolist() for members in self._gather_rows(row)]
        for other, theirs in enumerate(chosen):
            if theirs != ranks:
                raise ValueError(
                    f"all ranks add the same process sets: rank {self.rank} adds {ranks}, rank {other} adds {theirs}"
                )
        for other_set in self._sets.values():
            if other_set.ranks == ranks:
                raise ValueError(
                    f"{other_set} has the ranks {ranks} already; use it instead of another set of these ranks"
                )
        self._register(process_set, ranks, max(self._sets) + 1)
        return process_set

    def remove_process_set(self, process_set: ProcessSet) -> bool:
        """Remove a process set, on all ranks alike; False for the set of all ranks, which stays."""
        self.joined()
        if process_set.process_set_id is None:
            raise ValueError(f"{process_set} is not registered")
        if process_set.process_set_id == 0:
            return False
        engine = process_set.engine
        del self._sets[process_set.process_set_id]
        process_set.invalidate()
        if engine is not None:
            engine.close()
        return True

    def process_sets(self) -> dict[int, list[int]]:
        """The ranks of each registered set, by its number."""
        self.joined()
        return {number: list(process_set.ranks or ()) for number, process_set in self._sets.items()}

    def _register(self, process_set: ProcessSet, ranks: list[int], number: int) -> None:
        engine = None
        groups = [self._new_group([self._world[rank] for rank in ranks]) for _ in range(2)]
        if self.rank in ranks:
            engine = Engine(Groups(groups[0], groups[1]), ranks, self.settings, self.timeline, TIMEOUT_S)
            self._groups += groups
        process_set.register(number, ranks, self.rank, engine)
        self._sets[number] = process_set

    def _new_group(self, ranks: list[int]) -> dist.ProcessGroup:
        """A group over ranks of torch's world; those outside get a placeholder."""
        backend = dist.get_backend()
        whole = len(self._world) == self.joined().size
        group: dist.ProcessGroup = dist.new_group(
            ranks,
            # negotiation needs a backend for CPU tensors, which NCCL is not
            backend="farandole" if backend == "nccl" else backend,
            timeout=timedelta(seconds=TIMEOUT_S),
            use_local_synchronization=not whole,
        )
        return group

    # ---- handles, timeline ----

    def hand_out(self, engine: Engine, request: Request, collect: Collect) -> int:
        """Submit a request; the number by which its result, `collect(request)`, can be had."""
        engine.submit(request)
        handle = next(self._numbers)
        self.handles[handle] = (engine, request, collect)
        return handle

    def start_timeline(self, path: str, marks_cycles: bool) -> None:
        """Begin a timeline, which rank 0 writes."""
        if self.rank == 0:
            self.timeline.start(path, marks_cycles)


horovod = Horovod()


# ---- Horovod's functions ----

init = horovod.init
shutdown = horovod.shutdown
add_process_set = horovod.add_process_set
remove_process_set = horovod.remove_process_set


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return horovod.runtime is not None


def rank() -> int:
    """This process's number, 0 to size() - 1."""
    return horovod.rank


def size() -> int:
    """How many processes there are."""
    return horovod.size


def local_rank() -> int:
    """This process's number among those of its host."""
    return horovod.local[0]


def local_size() -> int:
    """How many processes this host has."""
    return horovod.local[1]


def cross_rank() -> int:
    """This host's number among those that have a process of this local rank."""
    return horovod.local[2]


def cross_size() -> int:
    """How many hosts have a process of this local rank."""
    return horovod.local[3]


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return horovod.homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write a timeline (rank 0 writes it); ValueError if one is being written."""
    horovod.joined()
    horovod.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline."""
    horovod.joined()
    horovod.timeline.stop()
