"""MPI groups: the backend `farandole-mpi`, torch's own backend name `mpi`, and mpi4py communicators."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from farandole._torch_versions import report_untested
from farandole.comm import dense
from farandole.comm.backend.process_group import FarandoleProcessGroup
from farandole.comm.describe import Membership
from farandole.comm.host import Rendezvous
from farandole.comm.mpi import cuda
from farandole.comm.mpi.core import MpiCore
from farandole.comm.mpi.engine import engine
from farandole.comm.mpi.group import MpiGroup

LOOPBACK = "127.0.0.1"
DEFAULT_TIMEOUT = timedelta(minutes=30)


def create(opts: Any, backend_options: Any = None) -> FarandoleProcessGroup:
    """Create a group; `init_process_group("farandole-mpi")` and `new_group` call this on every rank of the group."""
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    return _make_group(
        opts.store, opts.group_rank, ranks, opts.timeout or DEFAULT_TIMEOUT, str(opts.group_id)
    )


def core_over(comm: Any, timeout: timedelta) -> MpiCore:
    """Return an `MpiCore` over a duplicate of the mpi4py communicator `comm`; all ranks of `comm` call this."""
    mpi_engine = engine()
    with mpi_engine.making_group(), mpi_engine.lock:
        copy = comm.Dup()
        copy.Set_errhandler(mpi_engine.mpi.ERRORS_RETURN)
        told = copy.allgather((os.getpid(), socket.gethostname()))
        store = _store_over(copy, timeout)
    pids, hosts = [pid for pid, _ in told], [host for _, host in told]
    membership = Membership("the MPI communicator", range(len(told)), pids, hosts)
    return _core(MpiGroup(copy, mpi_engine, membership, store, timeout))


def _make_group(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    name: str,
    backend: str = "farandole-mpi",
) -> FarandoleProcessGroup:
    """Return a process group of the world ranks `ranks`; all these ranks must call this function."""
    report_untested(ranks[rank])
    is_default = name in ("0", "default", "default_pg")
    who = "the default group" if is_default else f"group {name!r} (ranks {', '.join(map(str, ranks))})"
    rendezvous = Rendezvous(store, rank, len(ranks), timeout, who)
    group = MpiGroup.connect(rendezvous, len(ranks), timeout, who, ranks)
    core = _core(group, backend)
    return FarandoleProcessGroup(rendezvous.store, group.rank, group.size, timeout, name, core, None, backend)


def _core(group: MpiGroup, name: str = "farandole-mpi") -> MpiCore:
    if cuda.is_aware():
        dense.reachable.add("cuda")
    return MpiCore(group, name)


# ---- rendezvous ----


def rendezvous(
    url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield the store, rank and world size for `init_method="mpi://"`; rank 0 hosts the store."""
    world = engine().mpi.COMM_WORLD
    yield _world_store(timeout), world.Get_rank(), world.Get_size()
    raise RuntimeError(
        "the mpi:// init_method does not support re-rendezvous; call destroy_process_group() and then "
        "init_process_group() again"
    )


def _world_store(timeout: timedelta) -> dist.Store:
    """Return a store with a new prefix; every rank must call this function the same number of times."""
    number = next(_rendezvous_numbers())
    return dist.PrefixStore(f"rendezvous-{number}/", _job_store(timeout))


@functools.cache
def _rendezvous_numbers() -> Iterator[int]:
    return iter(range(1 << 62))


@functools.cache
def _job_store(timeout: timedelta) -> dist.Store:
    mpi_engine = engine()
    with mpi_engine.lock:
        return _store_over(mpi_engine.mpi.COMM_WORLD, timeout)


def _store_over(comm: Any, timeout: timedelta) -> dist.Store:
    """Return a store that rank 0 of an MPI communicator hosts on a free port."""
    if comm.Get_size() == 1:
        return dist.HashStore()
    hosts = comm.allgather(socket.gethostname())
    one_host = len(set(hosts)) == 1
    host = LOOPBACK if one_host else os.environ.get("MASTER_ADDR") or hosts[0]
    listener = socket.create_server((LOOPBACK if one_host else "", 0)) if comm.Get_rank() == 0 else None
    port = comm.bcast(listener.getsockname()[1] if listener else 0, root=0)
    if listener is None:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


# ---- torch's own backend name `mpi`, which torch wheels do not support ----


def enable(timeout_s: float = DEFAULT_TIMEOUT.total_seconds()) -> None:
    """Register this package as torch's backend `mpi`; `is_mpi_available()` then returns True.

    This replaces torch's class for MPI groups, even if torch was built with MPI.  Rank and world size come from MPI.
    torch passes no timeout to MPI groups, so they use `timeout_s`.

    Args:
        timeout_s: The timeout, in seconds, of all groups created after this call.
    """
    timeout = timedelta(seconds=timeout_s)

    class ProcessGroupMPI:
        """The class that torch uses to create MPI groups."""

        @staticmethod
        def create(ranks: list[int]) -> FarandoleProcessGroup:
            """Return a group of the world ranks `ranks` (empty: all ranks); only these ranks call this method."""
            world = engine().mpi.COMM_WORLD
            members = list(ranks) or list(range(world.Get_size()))
            if not ranks:
                _stores[:] = [_world_store(timeout)]
            rank = members.index(world.Get_rank())
            store = dist.PrefixStore(f"{'-'.join(map(str, ranks)) or 'world'}/", _stores[0])
            name = f"of {len(ranks)} ranks" if ranks else "default"
            return _make_group(store, rank, members, timeout, name, backend="mpi")

    distributed_c10d._MPI_AVAILABLE = True
    for module in (distributed_c10d, dist):
        setattr(module, "ProcessGroupMPI", ProcessGroupMPI)  # noqa: B010 - missing in torch's stubs


_stores: list[dist.Store] = []
"""The default group's store, which subgroups also use because torch does not pass them a store."""
