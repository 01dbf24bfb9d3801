"""Making a process group of the backend `farandole`, which all its ranks do at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farandole.comm.algorithms.choice import Choice
from farandole.comm.collectives import HostCollectives
from farandole.comm.fallback import gloo_group
from farandole.comm.gathering import CannotShareMemory, Gathered, gather
from farandole.comm.host import Meeting
from farandole.comm.hosts import Hosts
from farandole.comm.options import Options
from farandole.comm.process_group import FarandoleProcessGroup
from farandole.comm.remark import say_once
from farandole.comm.spanning import SpanningCollectives
from farandole.comm.transport import TorchTransport, Transport

_SPARE_TIMEOUT = timedelta(minutes=30)


def create(opts: Any, backend_options: Any = None) -> FarandoleProcessGroup:
    """What `init_process_group("farandole")` and `new_group` call, on every rank of the group."""
    rank, size = opts.group_rank, opts.group_size
    ranks = list(opts.global_ranks_in_group) or list(range(size))
    name = str(opts.group_id or "default")
    is_default = name in ("0", "default", "default_pg")
    who = "the default group" if is_default else f"group {name!r} (ranks {', '.join(map(str, ranks))})"
    timeout = opts.timeout or _SPARE_TIMEOUT
    options = Options.of(backend_options)
    meeting = Meeting(opts.store, rank, size, timeout, who)
    try:
        gathered = gather(meeting, rank, size, timeout, who, ranks, options.interface)
    except CannotShareMemory as reason:
        if rank == 0:
            say_once(f"{who} communicates through Gloo: {reason}")
        return FarandoleProcessGroup(meeting.store, rank, size, timeout, name, None, None, None)
    carrier: HostCollectives | SpanningCollectives = HostCollectives(gathered.host)
    if len(gathered.hosts) > 1:
        leg = _leg(options, gathered, rank, meeting, timeout)
        hosts = Hosts(gathered.host, gathered.hosts, options.leaders, leg)
        carrier = SpanningCollectives(hosts, Choice(options.algorithm))
    return FarandoleProcessGroup(
        meeting.store, rank, size, timeout, name, gathered.host, carrier, gathered.address
    )


def _leg(
    options: Options, gathered: Gathered, rank: int, meeting: Meeting, timeout: timedelta
) -> Transport | None:
    """The transport between the leaders that this rank is one of, where it is not our own."""
    if options.transport == "tcp":
        return None
    number = gathered.host.rank
    if number >= min(len(ranks) for ranks in gathered.hosts):
        return None
    index = next(index for index, ranks in enumerate(gathered.hosts) if rank in ranks)
    store = dist.PrefixStore(f"leg-{number}/", meeting.store)
    return TorchTransport(gloo_group(store, index, len(gathered.hosts), timeout, gathered.address))
