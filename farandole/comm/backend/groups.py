"""Create groups of the backend `farandole`, for `torch.distributed` and for `Communicator.split`."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farandole._torch_versions import report_untested
from farandole._troubleshooting import see
from farandole.comm.accelerators import lacks_nccl
from farandole.comm.algorithms.choice import Choice
from farandole.comm.backend.process_group import FarandoleProcessGroup
from farandole.comm.communicator import Communicator
from farandole.comm.core import GroupCore
from farandole.comm.dispatcher import Dispatcher
from farandole.comm.endpoint import CannotShareMemory, Endpoint
from farandole.comm.fallback import gloo_group, has_nccl, nccl_group
from farandole.comm.hierarchical.core import HierarchicalCore
from farandole.comm.hierarchical.hosts import Hosts
from farandole.comm.host_group import HostGroup
from farandole.comm.native_core import NativeCore
from farandole.comm.notices import warn_once
from farandole.comm.options import Options
from farandole.comm.transport import DeviceTransport, TorchTransport, Transport

_SPARE_TIMEOUT = timedelta(minutes=30)


def create(opts: Any, backend_options: Any = None) -> FarandoleProcessGroup:
    """Create a process group.

    `init_process_group("farandole")` and `new_group` call this function on every rank of the new group.
    """
    rank, size = opts.group_rank, opts.group_size
    ranks = list(opts.global_ranks_in_group) or list(range(size))
    report_untested(ranks[rank])
    name = str(opts.group_id or "default")
    is_default = name in ("0", "default", "default_pg")
    who = "the default group" if is_default else f"group {name!r} (ranks {', '.join(map(str, ranks))})"
    timeout = opts.timeout or _SPARE_TIMEOUT
    options = Options.of(backend_options)
    endpoint, members = _endpoint_of(ranks, is_default), ranks
    if endpoint is None:
        members = list(range(size))
        try:
            endpoint = Endpoint.bootstrap(opts.store, rank, size, timeout, who, options.interface)
        except CannotShareMemory as reason:
            if rank == 0:
                warn_once(f"{who} communicates through Gloo: {reason}{see('communicates-through-gloo')}")
            return FarandoleProcessGroup(opts.store, rank, size, timeout, name, None, None)
    core = form(endpoint, members, ranks, name, who, timeout, options)
    return FarandoleProcessGroup(core.host.store, rank, size, timeout, name, core, endpoint.address)


def connect(store: dist.Store, rank: int, size: int, timeout: timedelta, name: str) -> Communicator:
    """Connect the processes that share `store`, and return their communicator.  This is a collective call.

    The communicator does not depend on torch's default group.  Each process passes its own rank.

    Raises:
        CannotShareMemory: if a process cannot use the C core.
    """
    options = Options()
    endpoint = Endpoint.bootstrap(store, rank, size, timeout, name, options.interface)
    ranks = list(range(size))
    core: Any = form(endpoint, ranks, ranks, name, name, timeout, options)
    return Communicator.over(Dispatcher(core, name))


def form(
    endpoint: Endpoint,
    members: Sequence[int],
    ranks: Sequence[int],
    name: str,
    who: str,
    timeout: timedelta,
    options: Options,
) -> GroupCore:
    """Create a group of some ranks of an endpoint.  The ranks in `members`, and no others, must call this function.

    Args:
        members: The ranks of the endpoint that form the group, in the order of their ranks in the group.
        ranks: The rank numbers that error messages show for the members.
        name: A name that distinguishes groups that are created at the same time.
        who: The name of the group in error messages.
        timeout: How long a call may wait for other ranks.
    """
    hosts = endpoint.hosts_of(members)
    table = options.measurements() if len(hosts) > 1 else None
    signature = zlib.crc32(f"{options.algorithm} {options.exchange} {table.dump()}".encode()) if table else 0
    host = endpoint.form(members, ranks, name, who, timeout, signature)
    core: GroupCore = NativeCore(host)
    if table:
        transport = _inter_node_transport(options, host, hosts, timeout)
        core = HierarchicalCore(
            Hosts(host, hosts, options.leaders, transport), Choice(options.algorithm, table, options.exchange)
        )
    # counts are equal on all members, which create groups of the same ranks in the same order
    made: Counter[tuple[int, ...]] = Counter()

    def form_subgroup(chosen: Sequence[int]) -> GroupCore:
        part, numbers = [members[r] for r in chosen], [ranks[r] for r in chosen]
        part_name = f"{name}/{'-'.join(map(str, chosen))}/{made[tuple(chosen)]}"
        made[tuple(chosen)] += 1
        part_who = f"group {part_name!r} (ranks {', '.join(map(str, numbers))})"
        subgroup = form(endpoint, part, numbers, part_name, part_who, host.timeout, options)
        subgroup.takes_devices = True  # there is no torch group for CUDA tensors
        return subgroup

    core.form_subgroup = form_subgroup
    core.takes_devices = len(members) > 1 and (endpoint.shares_devices(members) or lacks_nccl())
    return core


def _endpoint_of(ranks: Sequence[int], is_default: bool) -> Endpoint | None:
    """Return the endpoint of the default group if a new group of `ranks` can use it, else None."""
    if is_default or not dist.is_initialized():
        return None
    host = getattr(dist.group.WORLD, "_host", None)
    if not isinstance(host, HostGroup) or not host.endpoint.can_form(ranks):
        return None
    return host.endpoint


def _inter_node_transport(
    options: Options, host: HostGroup, hosts: list[list[int]], timeout: timedelta
) -> Transport | None:
    """Return this rank's inter-node transport; None if the C core provides it or this rank is not a leader."""
    if options.transport == "tcp":
        return None
    if options.transport == "nccl" and not has_nccl():
        raise ValueError(
            "transport='nccl': expected a CUDA device and a torch build with NCCL, got "
            f"{'a torch build without NCCL' if torch.cuda.is_available() else 'no CUDA device'}; use transport='tcp'"
        )
    number = host.rank
    if number >= min(len(ranks) for ranks in hosts):
        return None
    index = next(index for index, ranks in enumerate(hosts) if host.group_rank in ranks)
    store = dist.PrefixStore(f"leaders-{number}/", host.store)
    if options.transport == "mpi":
        from farandole.comm.mpi.transport import MpiTransport  # loads MPI

        who = f"transport {number} between the hosts of {host.membership.group}"
        return MpiTransport.connect(store, index, len(hosts), timeout, who)
    if options.transport == "nccl":
        upward, downward = (
            nccl_group(dist.PrefixStore(name, store), index, len(hosts), timeout) for name in ("up/", "down/")
        )
        return DeviceTransport(upward, downward, torch.device("cuda", torch.cuda.current_device()))
    return TorchTransport(gloo_group(store, index, len(hosts), timeout, host.endpoint.address))
