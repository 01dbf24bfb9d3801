"""How the ranks of a group find each other: who shares a host, and how to reach those who do not.

Every rank publishes through the store who it is.  The ranks of a host map one segment, made by the first of
them.  Where there are several hosts, every rank listens at a port and tells the others where.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from socket import gethostname

from farandole import native
from farandole.comm.addresses import is_loopback, own_address, socket_address
from farandole.comm.describe import Roster
from farandole.comm.host import Meeting, Peer, Segment, host_identity, open_segment
from farandole.comm.host_group import HostGroup
from farandole.comm.verdict import Verdict


class CannotShareMemory(Exception):
    """The ranks of a group cannot use the core; the message says why."""


@dataclass(frozen=True)
class Gathered:
    """What the ranks of a group have found out.

    `hosts` lists the ranks of each host; `address` is where the other hosts reach this one, if there are any.
    """

    host: HostGroup
    hosts: list[list[int]]
    address: str | None


def gather(
    meeting: Meeting,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    global_ranks: Sequence[int],
    interface: str | None,
) -> Gathered:
    """Meet the other ranks.  `CannotShareMemory`, on all ranks alike, if the core cannot serve the group."""
    reason = native.why_unavailable()
    own = None if reason else Segment(native.library().frd_segment_bytes(1), "group")
    try:
        mine = Peer(
            f"{host_identity()}|{reason or ''}", gethostname(), os.getpid(), own.name if own else None
        )
        peers = meeting.exchange_peers(mine)
        if reasons := [peer.host.split("|")[1] for peer in peers if not peer.host.endswith("|")]:
            raise CannotShareMemory(reasons[0])
        hosts = _by_host(peers)
        if (most := max(len(ranks) for ranks in hosts)) > native.MAX_RANKS:
            raise CannotShareMemory(
                f"{most} ranks on a host are more than the {native.MAX_RANKS} of a segment"
            )
        roster = Roster(name, global_ranks, [peer.pid for peer in peers], [peer.name for peer in peers])
        members = next(ranks for ranks in hosts if rank in ranks)
        if own and rank == members[0]:
            own.resize(native.library().frd_segment_bytes(len(members)))
        meeting.exchange("sized", "")  # nobody maps a segment before it has its size
        group, problem = _try_join(rank, members, peers, roster)
        problems = meeting.exchange("joined", problem)
    finally:
        if own:
            own.close()
    for r, problem in enumerate(problems):
        if problem:
            if group:
                group.close()
            raise CannotShareMemory(f"rank {r} cannot open the memory of its host: {problem}")
    assert group is not None
    group.set_timeout(timeout)
    address = None
    if len(hosts) > 1:
        address = own_address(meeting.store, interface)
        _lay_wires(meeting, group, rank, members, size, address)
    return Gathered(group, hosts, address)


def _by_host(peers: Sequence[Peer]) -> list[list[int]]:
    """The ranks of each host; hosts in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, peer in enumerate(peers):
        hosts.setdefault(peer.host, []).append(rank)
    return list(hosts.values())


def _try_join(
    rank: int, members: Sequence[int], peers: Sequence[Peer], roster: Roster
) -> tuple[HostGroup | None, str]:
    segment = peers[members[0]].segment
    assert segment is not None
    try:
        descriptor = open_segment(segment)
        try:
            return HostGroup(rank, members, descriptor, roster), ""
        finally:
            os.close(descriptor)
    except OSError as error:
        return None, str(error)


def _lay_wires(
    meeting: Meeting, group: HostGroup, rank: int, members: Sequence[int], size: int, address: str
) -> None:
    """Listen, tell the others where, and learn where they do.

    A token that only readers of the group's store know keeps strangers' connections out.
    """
    listener = socket.create_server(
        (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=min(size, 4096)
    )
    listener.setblocking(False)
    place = {"address": address, "port": listener.getsockname()[1]}
    if rank == 0:
        place["token"] = secrets.token_hex(native.TOKEN_BYTES // 2)
    places = [json.loads(text) for text in meeting.exchange("wires", json.dumps(place))]
    lonely = [r for r, each in enumerate(places) if is_loopback(each["address"])]
    if lonely and len(lonely) < size:
        raise OSError(
            f"{group.roster.rank(lonely[0])} has no address that other hosts can reach; bring a network interface "
            f"of its host up, or name one in GLOO_SOCKET_IFNAME"
        )
    token: str = places[0]["token"]
    group.open_wires(
        listener,
        socket_address(address, 0),
        token.encode(),
        {
            r: socket_address(place["address"], place["port"])
            for r, place in enumerate(places)
            if r not in members
        },
        Verdict(meeting.store, rank),
    )
