"""`farandole.init()`: join the job that this process was started in, however it was started."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from farandole._startup import resume_collection
from farandole.comm import Communicator, register
from farandole.launch.cores import affinity, usable_cores
from farandole.launch.environments import find_placement
from farandole.launch.meeting import open_store, wait_for_readers
from farandole.launch.placement import LaunchError, Placement


@dataclass
class Runtime:
    """This process as a rank of its job: who it is, where it is, and the way to the others.

    with farandole.init() as runtime:
        print(f"rank {runtime.rank} of {runtime.size} on {runtime.host}")
        runtime.comm.barrier()
    """

    rank: int
    """This rank's number in the world, 0 to `size` - 1."""
    size: int
    """How many ranks the world has."""
    local_rank: int
    """This rank's number among those of its host."""
    local_size: int
    """How many ranks this host has."""
    host: str
    """The name of this host."""
    device: torch.device
    """The device for this rank's tensors: an accelerator chosen by `local_rank`, or the CPU."""
    launcher: str
    """Who started the ranks: `farandole launch`, `torchrun`, `mpirun (Hydra)`, ..., or `alone`."""
    _comm: Communicator | None
    _owns_group: bool

    @property
    def comm(self) -> Communicator:
        """The collectives among all ranks of the world."""
        if self._comm is None:
            raise LaunchError("this runtime is closed; farandole.init() joins the job anew")
        return self._comm

    @property
    def world_is_gone(self) -> bool:
        """Whether this runtime is closed, or the program has destroyed the process group that it stands on."""
        return self._comm is None or self._comm.group is not dist.group.WORLD

    def close(self) -> None:
        """Leave the job: destroy torch's process group, unless the caller of `init` had made it.

        Done at the latest when the interpreter ends.  Without effect the second time.
        """
        comm, self._comm = self._comm, None
        if comm is not None and self._owns_group and comm.group is dist.group.WORLD:
            dist.destroy_process_group()
            # A Gloo group that is still referred to when the interpreter ends aborts the process.
            del comm.group

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def init(backend: str | None = None, *, timeout_s: float = 600.0) -> Runtime:
    """Join this process's job and return its `Runtime`; a process that is in no job is a world of one.

    Finds its place under `farandole launch`, torchrun, mpirun (MPICH and other Hydras, Open MPI) and srun,
    and meets the other ranks through torch's process group, which it makes, or takes as it is where
    the program has made one already.  Called by all ranks.

    backend: any backend of `torch.distributed`; by default ours, which uses Gloo where its core is missing.
    timeout_s: how long, in seconds, to wait for the other ranks: here, and in every collective.

    Raises `LaunchError` where the launcher's variables contradict each other, or where the ranks do
    not meet in time.
    """
    if dist.is_initialized():
        return _take_existing_group()
    placement = find_placement(os.environ)
    if placement.launcher.startswith(("mpirun", "srun")):
        _share_cores(placement, os.environ)
    device = _device(placement.local_rank)
    register()
    store = open_store(placement, timeout_s)
    dist.init_process_group(
        backend or "farandole",
        store=store,
        rank=placement.rank,
        world_size=placement.size,
        timeout=timedelta(seconds=timeout_s),
    )
    wait_for_readers(store, placement)
    resume_collection()
    return _runtime(placement.launcher, placement, device, owns_group=True)


def _take_existing_group() -> Runtime:
    """The runtime of a program that has called `init_process_group` itself."""
    placement = find_placement(os.environ)
    if (placement.rank, placement.size) == (dist.get_rank(), dist.get_world_size()):
        return _runtime(placement.launcher, placement, None, owns_group=False)
    return _runtime("torch.distributed", None, None, owns_group=False)


def _runtime(
    launcher: str, placement: Placement | None, device: torch.device | None, *, owns_group: bool
) -> Runtime:
    assert dist.group.WORLD is not None  # for the type checker: a group exists here
    comm = Communicator(dist.group.WORLD)
    host = socket.gethostname()
    if placement is None or placement.local_rank is None or placement.local_size is None:
        local_rank, local_size = _find_neighbours(host, comm)
    else:
        local_rank, local_size = placement.local_rank, placement.local_size
    runtime = Runtime(
        rank=comm.rank,
        size=comm.size,
        local_rank=local_rank,
        local_size=local_size,
        host=host,
        device=device or _device(local_rank),
        launcher=launcher,
        _comm=comm,
        _owns_group=owns_group,
    )
    atexit.register(runtime.close)
    return runtime


def _find_neighbours(host: str, comm: Communicator) -> tuple[int, int]:
    """Local rank and size, where no launcher told them: every rank says its host's name."""
    hosts: list[str] = [""] * comm.size
    dist.all_gather_object(hosts, host, group=comm.group)
    return hosts[: comm.rank].count(host), hosts.count(host)


def _device(local_rank: int | None) -> torch.device:
    """The accelerator of this rank, taken in turn where a host has more ranks than accelerators."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", (local_rank or 0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _share_cores(placement: Placement, environ: Mapping[str, str]) -> None:
    """Keep the ranks of mpirun or srun from using every core each: torch's threads, divided among the ranks.

    A launcher that binds its ranks (they may use less than it may) has divided the cores already, and
    OMP_NUM_THREADS is the user's word.
    """
    bound = affinity() < affinity(os.getppid())
    if placement.local_size is None or bound or environ.get("OMP_NUM_THREADS"):
        return
    threads = max(1, usable_cores() // placement.local_size)
    torch.set_num_threads(min(torch.get_num_threads(), threads))
