"""`init_process_group("mpi")`: torch's own name for MPI, which its wheels lack."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from farandole.comm.mpi.backend import SPARE_TIMEOUT, make_group, world_store
from farandole.comm.mpi.engine import engine
from farandole.comm.mpi.process_group import MpiProcessGroup


def enable(timeout_s: float = SPARE_TIMEOUT.total_seconds()) -> None:
    """Let `init_process_group("mpi")` make groups of ours, and `is_mpi_available()` say so.

    torch makes such groups through a class of its own builds, which has this process's rank and the world's size
    from MPI, and is not told of a timeout: `timeout_s`, in seconds, is that of all groups made after this call.
    A torch that was built with MPI uses this instead from here on.
    """
    timeout = timedelta(seconds=timeout_s)

    class ProcessGroupMPI:
        """What torch calls to make a group."""

        @staticmethod
        def create(ranks: list[int]) -> MpiProcessGroup:
            """A group of these ranks of the world, or of all; called by its members only."""
            world = engine().mpi.COMM_WORLD
            members = list(ranks) or list(range(world.Get_size()))
            if not ranks:
                _stores[:] = [world_store(timeout)]
            rank = members.index(world.Get_rank())
            store = dist.PrefixStore(f"{'-'.join(map(str, ranks)) or 'world'}/", _stores[0])
            name = f"of {len(ranks)} ranks" if ranks else "default"
            return make_group(store, rank, members, timeout, name, backend="mpi")

    distributed_c10d._MPI_AVAILABLE = True
    for module in (distributed_c10d, dist):
        setattr(module, "ProcessGroupMPI", ProcessGroupMPI)  # noqa: B010 - the stubs lack it, as wheels do


_stores: list[dist.Store] = []
"""Of the default group, through which sub-groups meet: torch hands such groups no store."""
