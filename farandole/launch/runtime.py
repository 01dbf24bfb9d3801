"""`farandole.init()`: make this process a rank of its job, under any launcher."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from farandole._startup import resume_collection
from farandole.comm import Communicator, register
from farandole.launch.bootstrap import open_store, wait_for_readers
from farandole.launch.cores import affinity, usable_cores
from farandole.launch.environments import find_placement
from farandole.launch.placement import LaunchError, Placement


@dataclass
class Runtime:
    """The rank, device and communicator of this process in its job.

    `farandole.init` creates the runtime:

        with farandole.init() as runtime:
            print(f"rank {runtime.rank} of {runtime.size} on {runtime.host}")
            runtime.comm.barrier()
    """

    rank: int
    """The index of this rank in the world, from 0 to `size` - 1."""
    size: int
    """The number of ranks in the world."""
    local_rank: int
    """The index of this rank on its host, from 0 to `local_size` - 1."""
    local_size: int
    """The number of ranks on this host."""
    host: str
    """The name of this host."""
    device: torch.device
    """The device of this rank's tensors: an accelerator chosen by `local_rank`, or the CPU."""
    launcher: str
    """The launcher of the ranks: `farandole launch`, `torchrun`, `mpirun (Hydra)`, ..., or `alone`."""
    _comm: Communicator | None
    _owns_group: bool

    @property
    def comm(self) -> Communicator:
        """The communicator of all ranks in the world.

        Raises:
            LaunchError: if the runtime is closed.
        """
        if self._comm is None:
            raise LaunchError("this runtime is closed; call farandole.init() to join the job again")
        return self._comm

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or the program has destroyed this runtime's process group."""
        return self._comm is None or self._comm.group is not dist.group.WORLD

    def close(self) -> None:
        """Leave the job: destroy torch's process group, unless the program created it before `init`.

        The interpreter calls this method when it exits.  Further calls have no effect.
        """
        comm, self._comm = self._comm, None
        if comm is not None and self._owns_group and comm.group is dist.group.WORLD:
            dist.destroy_process_group()
            # If the interpreter ends while a Gloo group is still referenced, the process aborts.
            del comm.group

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def init(backend: str | None = None, *, timeout_s: float = 600.0) -> Runtime:
    """Join the job of this process, and return a `Runtime`.

    All ranks must call this function.  Without a launcher, this process is the only rank.  The function reads the rank
    from the variables that the launcher has set, and creates torch's process group.  A process group that already
    exists is used unchanged.  The supported launchers are `farandole launch`, torchrun, mpirun (Open MPI, MPICH and
    other MPIs with Hydra) and srun.

    Args:
        backend: Any `torch.distributed` backend; None selects "farandole", or Gloo if farandole's C core is not
            available.
        timeout_s: How long to wait for the other ranks, in seconds, in this call and in every collective.

    Raises:
        LaunchError: if the launcher's variables contradict each other, or the ranks do not rendezvous in time.
    """
    placement = find_placement(os.environ)
    if dist.is_initialized():
        placed = (placement.rank, placement.size) == (dist.get_rank(), dist.get_world_size())
        return _runtime(placement if placed else None, None, owns_group=False)
    if placement.launcher.startswith(("mpirun", "srun")):
        _limit_threads(placement, os.environ)
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
    return _runtime(placement, device, owns_group=True)


def _runtime(placement: Placement | None, device: torch.device | None, *, owns_group: bool) -> Runtime:
    """Return the runtime for torch's process group; all ranks must call this function."""
    assert dist.group.WORLD is not None  # for the type checker
    comm = Communicator(dist.group.WORLD)
    host = socket.gethostname()
    if placement is None or placement.local_rank is None or placement.local_size is None:
        local_rank, local_size = _find_local_rank(host, comm)
    else:
        local_rank, local_size = placement.local_rank, placement.local_size
    runtime = Runtime(
        rank=comm.rank,
        size=comm.size,
        local_rank=local_rank,
        local_size=local_size,
        host=host,
        device=device or _device(local_rank),
        launcher=placement.launcher if placement else "torch.distributed",
        _comm=comm,
        _owns_group=owns_group,
    )
    atexit.register(runtime.close)
    return runtime


def _find_local_rank(host: str, comm: Communicator) -> tuple[int, int]:
    """Return the local rank and size, computed from the host names of all ranks."""
    hosts: list[str] = [""] * comm.size
    dist.all_gather_object(hosts, host, group=comm.group)
    return hosts[: comm.rank].count(host), hosts.count(host)


def _device(local_rank: int | None) -> torch.device:
    """Select and return an accelerator for this rank; without accelerators, return the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", (local_rank or 0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _limit_threads(placement: Placement, environ: Mapping[str, str]) -> None:
    """Limit torch's threads, unless the launcher has bound this rank to cores or OMP_NUM_THREADS is set."""
    # By default, torch uses every core in each rank.
    bound = affinity() < affinity(os.getppid())  # by mpirun or srun
    if placement.local_size is None or bound or environ.get("OMP_NUM_THREADS"):
        return
    threads = max(1, usable_cores() // placement.local_size)
    torch.set_num_threads(min(torch.get_num_threads(), threads))
