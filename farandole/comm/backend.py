"""Making a process group of the backend `farandole`, which all its ranks do at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from farandole.comm.host import Meeting
from farandole.comm.host_group import HostGroup, NotOnOneHost
from farandole.comm.process_group import FarandoleProcessGroup
from farandole.comm.remark import say_once

_SPARE_TIMEOUT = timedelta(minutes=30)


def create(opts: Any, backend_options: Any = None) -> FarandoleProcessGroup:
    """What `init_process_group("farandole")` and `new_group` call, on every rank of the group."""
    rank, size = opts.group_rank, opts.group_size
    ranks = list(opts.global_ranks_in_group) or list(range(size))
    name = str(opts.group_id or "default")
    is_default = name in ("0", "default", "default_pg")
    who = "the default group" if is_default else f"group {name!r} (ranks {', '.join(map(str, ranks))})"
    timeout = opts.timeout or _SPARE_TIMEOUT
    meeting = Meeting(opts.store, rank, size, timeout, who)
    try:
        host = HostGroup.meet(meeting, rank, size, timeout, who, ranks)
    except NotOnOneHost as reason:
        if rank == 0:
            say_once(f"{who} communicates through Gloo: {reason}")
        host = None
    return FarandoleProcessGroup(meeting.store, rank, size, timeout, name, host)
