"""Store this process's Horovod state in the object `horovod`."""

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

from farandole.horovod.elastic import World, form
from farandole.horovod.engine import Engine, Groups, Settings, unsupported
from farandole.horovod.monitoring import Timeline
from farandole.horovod.process_sets import NOT_INITIALIZED, ProcessSet, global_process_set
from farandole.horovod.requests import ALLGATHER, HorovodInternalError, Request, Signature
from farandole.launch.runtime import Runtime
from farandole.launch.runtime import init as join_job

_log = logging.getLogger("horovod")

TIMEOUT_S = 600.0
"""The timeout for collective operations, and for operations that only some ranks have submitted."""


Collect = Callable[[Request], Any]
"""A function that returns an operation's result, given the finished request."""


class Horovod:
    """This process's Horovod state: the world's ranks, the process sets and the pending requests."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.timeline = Timeline()
        self.settings = Settings()
        self.handles: dict[int, tuple[Engine, Request, Collect]] = {}
        self._numbers = itertools.count(1)  # starts at 1, because Horovod scripts test `if handle`
        self._sets: dict[int, ProcessSet] = {}
        self._world: list[int] = []  # global torch.distributed ranks
        self._groups: list[dist.ProcessGroup] = []
        self._local = (0, 1, 0, 1)
        self._homogeneous = True
        self._owns_world = False
        self._elastic: World | None = None
        self._generation = 0
        atexit.register(self.shutdown)

    # ---- initialization and shutdown ----

    def init(self, comm: Any = None, process_sets: str | Iterable[ProcessSet] | None = None) -> None:
        """Join the job.  Repeated calls do nothing.

        Args:
            comm: The job's ranks that form Horovod's world: an ascending list of ranks, or an mpi4py communicator.  All
                ranks in the list must pass the same list.  None or an empty list selects all ranks of the job.
            process_sets: The process sets to register.  "dynamic" registers none.  More sets can always be added later.

        Raises:
            ValueError: if `comm` or `process_sets` is invalid, this rank is not in `comm`, or an environment variable
                has an invalid value.
        """
        if self.runtime is not None:
            if not self._world_is_destroyed():
                return
            self.shutdown()
        self.settings = Settings.read(os.environ)
        self._owns_world = not dist.is_initialized()
        runtime = join_job(timeout_s=TIMEOUT_S)
        self._world = self._chosen_ranks(comm, runtime)
        if runtime.rank not in self._world:
            raise ValueError(
                f"hvd.init(comm={self._world}) was called by rank {runtime.rank}, which is not in comm; "
                f"call hvd.init on the ranks in comm only"
            )
        self.runtime = runtime
        # exit handlers run in reverse order of registration, and the engines must end before runtime.close()
        atexit.unregister(self.shutdown)
        atexit.register(self.shutdown)
        if self.rank == 0:
            for sentence in unsupported(os.environ):
                _log.warning(sentence)
        self._register(global_process_set, list(range(len(self._world))), 0)
        self._set_local_ranks(runtime)
        if self.settings.timeline not in ("", "DYNAMIC"):
            self.start_timeline(self.settings.timeline, self.settings.timeline_marks_cycles)
        if isinstance(process_sets, str):
            if process_sets != "dynamic":
                raise ValueError(
                    f'expected process_sets to be a list of ProcessSets or "dynamic", got {process_sets!r}'
                )
        else:
            for process_set in process_sets or ():
                self.add_process_set(process_set)

    def shutdown(self) -> None:
        """Leave the job.  Operations in flight fail on all ranks.  Repeated calls do nothing."""
        if self.runtime is None:
            return
        gone, runtime, self.runtime = self._world_is_destroyed(), self.runtime, None
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
            if not gone:  # destroying the world also destroys its groups
                dist.destroy_process_group(group)
        runtime.close()
        if self._owns_world and dist.is_initialized():
            # runtime.close() does not destroy a world that elastic.form created
            dist.destroy_process_group()

    def _world_is_destroyed(self) -> bool:
        return self.runtime is None or self.runtime.is_closed

    # ---- elastic programs ----

    def prepare_to_reform(self) -> None:
        """Exchange process ids and hosts, so that the surviving ranks can form a new world if a rank dies."""
        runtime = self.joined()
        if self._elastic is not None or runtime.size == 1:
            return
        if not self._owns_world:
            raise HorovodInternalError(
                "hvd.elastic.run cannot form a new world, because the program has called "
                "torch.distributed.init_process_group; remove that call and let hvd.init() initialize the process group"
            )
        store = _get_default_store()
        self._elastic = World(store, runtime.rank, runtime.size, self._generation)

    def reform(self) -> None:
        """Leave the world, and form a new world with the surviving ranks.  All survivors must call this method."""
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
            raise ValueError(f"expected comm to be a list of ranks or an mpi4py communicator, got {comm!r}")
        ranks = list(comm)
        if ranks != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < runtime.size:
            raise ValueError(
                f"expected comm to be an ascending list of distinct ranks from 0 to {runtime.size - 1}, got {ranks}"
            )
        return ranks

    # ---- ranks and hosts ----

    def joined(self) -> Runtime:
        """Return the job's runtime.

        Raises:
            ValueError: if `init` has not been called.
        """
        if self.runtime is None:
            raise ValueError(NOT_INITIALIZED)
        return self.runtime

    @property
    def rank(self) -> int:
        """Return this process's rank in Horovod's world."""
        return self._world.index(self.joined().rank)

    @property
    def size(self) -> int:
        """Return the number of ranks in Horovod's world."""
        self.joined()
        return len(self._world)

    @property
    def local(self) -> tuple[int, int, int, int]:
        """Return the local rank, local size, cross rank and cross size."""
        self.joined()
        return self._local

    @property
    def homogeneous(self) -> bool:
        """Return whether all hosts have the same number of ranks."""
        self.joined()
        return self._homogeneous

    def _set_local_ranks(self, runtime: Runtime) -> None:
        """Derive `local` and `homogeneous` from the hosts of all ranks."""
        hosts: list[str] = [text.rstrip("\0") for text in self._gather_text(runtime.host)]
        own_host, rank = hosts[self.rank], self.rank
        local_rank, local_size = hosts[:rank].count(own_host), hosts.count(own_host)
        if len(self._world) == runtime.size:
            local_rank, local_size = runtime.local_rank, runtime.local_size
        names = list(dict.fromkeys(hosts))
        peers = [name for name in names if hosts.count(name) > local_rank]
        self._local = (
            local_rank,
            local_size,
            peers.index(own_host) if own_host in peers else 0,
            max(1, len(peers)),
        )
        self._homogeneous = len({hosts.count(name) for name in names}) == 1

    def _gather_text(self, text: str) -> list[str]:
        """All-gather one string per rank, truncated or null-padded to 256 bytes."""
        data = torch.zeros(1, 256, dtype=torch.uint8)
        encoded = text.encode()[:256]
        data[0, : len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        return [row.numpy().tobytes().decode(errors="replace") for row in self._gather_rows(data)]

    def _gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        signature = Signature(ALLGATHER, (row.dtype,), (tuple(row.shape),))
        engine = global_process_set.member()
        request = Request(engine.name_for("init"), signature, [row])
        engine.submit(request)
        engine.wait(request)
        return request.outputs[0]

    # ---- process sets ----

    def add_process_set(self, process_set: ProcessSet | Iterable[int]) -> ProcessSet:
        """Register a process set.  All ranks must add the same sets in the same order.

        Args:
            process_set: The process set, or its ranks.

        Returns:
            The registered process set.

        Raises:
            ValueError: if the set is already registered, the set has invalid ranks, another registered set has the same
                ranks, or ranks add different sets.
        """
        if not isinstance(process_set, ProcessSet):
            process_set = ProcessSet(process_set)
        size, ranks = self.size, process_set.ranks
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set} is already registered; do not add it again")
        if not ranks or not 0 <= ranks[0] <= ranks[-1] < size:
            raise ValueError(f"expected one or more ranks from 0 to {size - 1}, got {process_set}")
        row = torch.zeros(1, size, dtype=torch.uint8)
        row[0, ranks] = 1
        chosen = [torch.nonzero(members).flatten().tolist() for members in self._gather_rows(row)]
        for other, theirs in enumerate(chosen):
            if theirs != ranks:
                raise ValueError(
                    f"all ranks must add the same process sets, but rank {self.rank} adds {ranks} "
                    f"and rank {other} adds {theirs}"
                )
        for other_set in self._sets.values():
            if other_set.ranks == ranks:
                raise ValueError(
                    f"{other_set} already has the ranks {ranks}; use this set instead of adding another one"
                )
        self._register(process_set, ranks, max(self._sets) + 1)
        return process_set

    def remove_process_set(self, process_set: ProcessSet) -> bool:
        """Remove a process set.  All ranks must call this function.

        Returns:
            True, or False for the global process set, which cannot be removed.

        Raises:
            ValueError: if the set is not registered.
        """
        self.joined()
        if process_set.process_set_id is None:
            raise ValueError(
                f"cannot remove {process_set}, because the set is not registered; omit the call, or register the set first"
            )
        if process_set.process_set_id == 0:
            return False
        engine = process_set.engine
        del self._sets[process_set.process_set_id]
        process_set.invalidate()
        if engine is not None:
            engine.close()
        return True

    def process_sets(self) -> dict[int, list[int]]:
        """Return a dict that maps the id of each registered set to its ranks."""
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
        """Create a process group.  `ranks` are global torch.distributed ranks."""
        backend = dist.get_backend()
        whole = len(self._world) == self.joined().size
        group: dist.ProcessGroup = dist.new_group(
            ranks,
            # negotiation uses CPU tensors, which NCCL does not support
            backend="farandole" if backend == "nccl" else backend,
            timeout=timedelta(seconds=TIMEOUT_S),
            use_local_synchronization=not whole,
        )
        return group

    # ---- handles, timeline ----

    def submit(self, engine: Engine, request: Request, collect: Collect) -> int:
        """Submit a request and return its handle.  `synchronize(handle)` returns `collect(request)`."""
        engine.submit(request)
        handle = next(self._numbers)
        self.handles[handle] = (engine, request, collect)
        return handle

    def start_timeline(self, path: str, marks_cycles: bool) -> None:
        """Start writing the timeline on rank 0; do nothing on other ranks.

        Args:
            path: The file to write.
            marks_cycles: Whether to record each cycle of the engine.
        """
        if self.rank == 0:
            self.timeline.start(path, marks_cycles)


horovod = Horovod()
