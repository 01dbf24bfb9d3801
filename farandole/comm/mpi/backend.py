"""Making a process group of the backend `farandole-mpi`, and the place where its ranks meet."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farandole.comm import dense
from farandole.comm.host import Meeting
from farandole.comm.mpi import cuda
from farandole.comm.mpi.engine import engine
from farandole.comm.mpi.group import MpiGroup
from farandole.comm.mpi.process_group import MpiProcessGroup

LOOPBACK = "127.0.0.1"
SPARE_TIMEOUT = timedelta(minutes=30)


def create(opts: Any, backend_options: Any = None) -> MpiProcessGroup:
    """What `init_process_group("farandole-mpi")` and `new_group` call, on every rank of the group."""
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    return make_group(opts.store, opts.group_rank, ranks, opts.timeout or SPARE_TIMEOUT, str(opts.group_id))


def make_group(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    name: str,
    backend: str = "farandole-mpi",
) -> MpiProcessGroup:
    """A process group of `ranks` of the world, called by all of them; `rank` is this one's number in it."""
    is_default = name in ("0", "default", "default_pg")
    who = "the default group" if is_default else f"group {name!r} (ranks {', '.join(map(str, ranks))})"
    meeting = Meeting(store, rank, len(ranks), timeout, who)
    group = MpiGroup.meet(meeting, len(ranks), timeout, who, ranks)
    if cuda.is_aware():
        dense.reachable.add("cuda")
    return MpiProcessGroup(meeting.store, timeout, name, group, backend)


def rendezvous(
    url: str, timeout: timedelta = SPARE_TIMEOUT, **_: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """`init_method="mpi://"`: rank and size are MPI's, and rank 0 keeps a store."""
    world = engine().mpi.COMM_WORLD
    yield world_store(timeout), world.Get_rank(), world.Get_size()
    raise RuntimeError("ranks of MPI cannot meet a second time through one rendezvous")


def world_store(timeout: timedelta) -> dist.Store:
    """A corner of the store of the job's ranks, a new one at each call; called by all ranks."""
    number = next(_meetings())
    return dist.PrefixStore(f"meeting-{number}/", _store(timeout))


@functools.cache
def _meetings() -> Iterator[int]:
    return iter(range(1 << 62))


@functools.cache
def _store(timeout: timedelta) -> dist.Store:
    """Kept by rank 0 at a free port, which MPI tells the others."""
    way = engine()
    world = way.mpi.COMM_WORLD
    if world.Get_size() == 1:
        return dist.HashStore()
    with way.lock:
        hosts = world.allgather(socket.gethostname())
    one_host = len(set(hosts)) == 1
    host = LOOPBACK if one_host else os.environ.get("MASTER_ADDR") or hosts[0]
    listener = socket.create_server((LOOPBACK if one_host else "", 0)) if world.Get_rank() == 0 else None
    with way.lock:
        port = world.bcast(listener.getsockname()[1] if listener else 0, root=0)
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
