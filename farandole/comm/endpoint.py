"""Endpoints, which connect a process to the other processes of its job and serve all its groups.

An endpoint is bootstrapped once through the job's store, to which every rank publishes its identity.  Each process has
an arena in shared memory, which the other ranks on its host map.  If there are several hosts, every rank listens on a
port and publishes its address.

To create a group, every member reserves memory in its arena and sends the offset of the memory to the group's first
rank.  The first rank assigns a number to the group, and sends the number and all offsets to the members.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import resource
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from socket import gethostname

import torch.distributed as dist

from farandole import native
from farandole._job_key import VARIABLE, derive, job_key
from farandole.comm.accelerators import must_share, visible_devices
from farandole.comm.describe import Membership
from farandole.comm.errors import CommunicationError, RankLate
from farandole.comm.failure_consensus import FailureConsensus
from farandole.comm.forks import invalidate_after_fork
from farandole.comm.host import Rendezvous, Segment, SegmentName, host_identity, open_segment
from farandole.comm.host_group import HostGroup
from farandole.comm.interfaces import is_loopback, own_address, socket_address
from farandole.native import LAST_STATUS, TRY, Status

ARENA_BYTES = 1 << 38
"""Address space of an arena in bytes; only used pages consume memory.  256 ranks on a host map 2^46 bytes each."""
LEAST_ARENA_BYTES = 1 << 26
_BYTE = 1 << 8 | 5


class CannotShareMemory(Exception):
    """Raised if the ranks of a job cannot use the C core; the message states the reason."""


@dataclass(frozen=True)
class Process:
    """The identity published by each rank."""

    host: str
    name: str
    pid: int
    arena: SegmentName
    arena_bytes: int
    block: int
    """The offset of the endpoint's memory in the arena."""
    base: int
    """The offset, in the arena, of this process's memory for the group of all ranks."""
    devices: Sequence[str] = ()
    """The CUDA devices visible to the process."""


@functools.cache
def _arena(process: int) -> tuple[Segment, int]:
    """Create the arena of this process; return the arena and its size in bytes."""
    # `process`, the process ID, is the key of the cache: a forked child creates its own arena
    core, size = native.library(), ARENA_BYTES
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)]
    for limit in limits:
        while limit != resource.RLIM_INFINITY and size > max(LEAST_ARENA_BYTES, limit // 64):
            size //= 2
    while True:
        try:
            segment = Segment(size, "arena")
            status = core.frd_arena_open(segment.descriptor, size)
            if not status:
                return segment, size
            segment.close()
            raise OSError(-status, os.strerror(-status))
        except OSError:
            if size <= LEAST_ARENA_BYTES:
                raise
            size //= 2


class Endpoint:
    """The connection between this process and the other processes of its job.

    `hosts` lists the ranks of each host.  `address` is the address at which other hosts reach this host, or None if the
    job runs on one host.
    """

    def __init__(self, store: dist.Store, rank: int, processes: Sequence[Process]) -> None:
        self.core = native.library()
        self.store = store
        self.rank = rank
        self.processes = list(processes)
        self.identity = processes[rank].host
        self.hosts = _by_host(processes)
        self.address: str | None = None
        self._owner = os.getpid()
        self._handle: int | None = None
        self._base: int | None = None
        self._users = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._roles: dict[int, str] = {}  # see `Membership`
        invalidate_after_fork(self)

    @classmethod
    def bootstrap(
        cls, store: dist.Store, rank: int, size: int, timeout: timedelta, who: str, interface: str | None
    ) -> Endpoint:
        """Connect to the other ranks.

        Raises:
            CannotShareMemory: on all ranks, if any rank cannot use the C core.
        """
        rendezvous = Rendezvous(store, rank, size, timeout, who)
        reason, handle, fields = native.why_unavailable() or "", None, {}
        if not reason:
            try:
                segment, arena_bytes = _arena(os.getpid())
                core = native.library()
                handle = core.frd_endpoint_open(rank, size)
                base = core.frd_group_reserve()
                if not handle or not base:
                    raise OSError(
                        "cannot allocate the endpoint of this process: out of memory; stop other processes on this host"
                    )
                own = Process(
                    host_identity(), gethostname(), os.getpid(), segment.name, arena_bytes,
                    core.frd_endpoint_block(handle), base, visible_devices(),
                )  # fmt: skip
                fields = asdict(own)
            except OSError as error:
                reason = str(error)
        told = [json.loads(text) for text in rendezvous.exchange("process", json.dumps([reason, fields]))]
        reasons = [reason for reason, _ in told if reason]
        processes = [
            Process(**each | {"arena": SegmentName(**each["arena"])}) for reason, each in told if not reason
        ]
        if not reasons and (most := max(map(len, _by_host(processes)))) > native.MAX_RANKS:
            reasons = [f"expected at most {native.MAX_RANKS} ranks per host to share memory, got {most}"]
        if reasons:
            if handle:
                native.library().frd_endpoint_close(handle)
            raise CannotShareMemory(reasons[0])
        endpoint = cls(rendezvous.store, rank, processes)
        endpoint._handle = handle
        endpoint._connect(rendezvous, timeout, who, interface)
        return endpoint

    def _connect(self, rendezvous: Rendezvous, timeout: timedelta, who: str, interface: str | None) -> None:
        problems = rendezvous.exchange("mapped", self._map_local_arenas())
        for rank, problem in enumerate(problems):
            if problem:
                self.core.frd_endpoint_close(self._handle)
                raise CannotShareMemory(f"rank {rank} cannot map the shared memory of its host: {problem}")
        if len(self.hosts) > 1:
            self.address = own_address(self.store, interface)
            self._listen(rendezvous, timeout)
        blocks = [process.base for process in self.processes]
        self._base = self._open_group(0, range(len(blocks)), blocks)
        # other ranks may already send messages; the C core buffers messages for groups that are not open yet

    def _map_local_arenas(self) -> str:
        """Map the arenas of this host's ranks; return the reason for a failure, else an empty string."""
        for rank in next(ranks for ranks in self.hosts if self.rank in ranks):
            process, descriptor = self.processes[rank], -1
            try:
                if rank != self.rank:
                    descriptor = open_segment(process.arena)
                error = self.core.frd_endpoint_add(
                    self._handle, rank, descriptor, process.arena_bytes, process.block, process.pid
                )
                if error:
                    raise OSError(error, os.strerror(error))
            except OSError as error:
                return str(error)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        return ""

    def _listen(self, rendezvous: Rendezvous, timeout: timedelta) -> None:
        """Listen for connections, and exchange addresses with the other ranks."""
        assert self.address is not None
        size, family = len(self.processes), socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.create_server((self.address, 0), family=family, backlog=min(size, 4096))
        listener.setblocking(False)
        place = {"address": self.address, "port": listener.getsockname()[1]}
        key, place["key_error"] = None, ""
        try:
            key = job_key()
        except ValueError as error:  # raised on all ranks after the exchange
            place["key_error"] = f"rank {self.rank}: {error}"
        place["key"] = derive(key, "fingerprint").hex() if key else ""
        if self.rank == 0:
            place["session"] = secrets.token_hex(16)
        places = [json.loads(text) for text in rendezvous.exchange("addresses", json.dumps(place))]
        if errors := [each["key_error"] for each in places if each["key_error"]]:
            raise ValueError(errors[0])
        self._check_keys([each["key"] for each in places])
        lonely = [r for r, each in enumerate(places) if is_loopback(each["address"])]
        if lonely and len(lonely) < size:
            process = self.processes[lonely[0]]
            raise OSError(
                f"rank {lonely[0]} (process {process.pid} on {process.name}) has no address that other hosts can "
                f"reach; enable a network interface on that host, or set GLOO_SOCKET_IFNAME to the name of an interface"
            )
        # the job key and the session token of rank 0 authenticate connections
        own, secret = socket_address(self.address, 0), derive(key or "", f"session {places[0]['session']}")
        failed = self.core.frd_tcp_open(
            self._handle, listener.detach(), own, len(own), secret, timeout.total_seconds()
        )
        for rank, each in enumerate(places):
            if self.processes[rank].host != self.identity:
                address = socket_address(each["address"], each["port"])
                failed = failed or self.core.frd_tcp_add(self._handle, rank, address, len(address))
        if failed or self.core.frd_tcp_start(self._handle):
            raise MemoryError(
                "cannot connect to other hosts: out of memory or threads; check `ulimit -u` and the available memory"
            )

    def _check_keys(self, fingerprints: Sequence[str]) -> None:
        """Raise ValueError if the ranks have different job keys, or if only some ranks have a key."""
        other = next((r for r, each in enumerate(fingerprints) if each != fingerprints[0]), None)
        if other is not None:
            without = [r for r in (0, other) if not fingerprints[r]]
            found = f"rank {without[0]} has none" if without else "the keys differ"
            raise ValueError(
                f"expected the same {VARIABLE} on ranks 0 and {other} (on {self.processes[0].name} and "
                f"{self.processes[other].name}), but {found}; set the same key on all hosts, or on none"
            )

    # ---- groups ----

    def can_form(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks can form a group; False after a fork or a change of namespaces."""
        usable = self._base is not None and os.getpid() == self._owner and host_identity() == self.identity
        return usable and all(0 <= rank < len(self.processes) for rank in ranks)

    def form(
        self,
        members: Sequence[int],
        global_ranks: Sequence[int],
        name: str,
        who: str,
        timeout: timedelta,
        signature: int = 0,
    ) -> HostGroup:
        """Create a group of these ranks; every member must call this method.

        Args:
            members: The members' ranks in the job, in the order of their group ranks.
            global_ranks: The members' global ranks, for error messages.
            name: A name that distinguishes groups that are created at the same time.
            who: The name of the group in error messages.
            timeout: The group's timeout, which also applies to the creation of the group.
            signature: A 32-bit number that must be equal on all members.

        Raises:
            RankLate: if a rank did not arrive before the timeout.
            CommunicationError: if a rank died or left the job.
            ValueError: if the ranks passed different lists of members or different signatures.
        """
        with self._lock:
            self._users += 1
        try:
            block = self.core.frd_group_reserve()
            if not block:
                raise MemoryError(
                    "cannot allocate shared memory for a group; destroy unused groups or free tensors created by "
                    "`Communicator.empty`"
                )
            try:
                context, blocks = self._agree(members, name, who, timeout, block, signature)
                handle = self._open_group(context, members, blocks)
            except BaseException:
                self.core.frd_group_unreserve(block)
                raise
            processes = [self.processes[member] for member in members]
            membership = Membership(
                who,
                global_ranks,
                [process.pid for process in processes],
                [process.name for process in processes],
                roles=self._roles,
            )
            here = [r for r, process in enumerate(processes) if process.host == self.identity]
            rank, consensus = list(members).index(self.rank), None
            store = dist.PrefixStore(f"group-{context}/", self.store)
            if len(here) < len(members):
                consensus = FailureConsensus(store, rank, len(members))
            group = HostGroup(self, handle, rank, here, membership, consensus, store)
            group.set_timeout(timeout)
            return group
        except BaseException:
            self.release()
            raise

    def hosts_of(self, members: Sequence[int]) -> list[list[int]]:
        """Return the group ranks of the members on each host."""
        return _by_host([self.processes[member] for member in members])

    def shares_devices(self, members: Sequence[int]) -> bool:
        """Return whether any host of these members has at least one CUDA device but fewer devices than ranks.

        Ranks that are not members also count, because the device that a rank uses is unknown.
        """
        used = {self.processes[member].host for member in members}
        hosts = [[self.processes[rank].devices for rank in ranks] for ranks in self.hosts]
        return must_share(
            devices
            for ranks, devices in zip(self.hosts, hosts, strict=True)
            if self.processes[ranks[0]].host in used
        )

    def _agree(
        self, members: Sequence[int], name: str, who: str, timeout: timedelta, block: int, signature: int
    ) -> tuple[int, list[int]]:
        """Agree with the other members on the group's number; return it and the arena offsets of all blocks."""
        leader, tag = members[0], zlib.crc32(name.encode()) & 0x7FFFFFFF
        deadline = time.monotonic() + timeout.total_seconds()
        record = struct.Struct("=QII")  # block (offset in the arena), signature, checksum of the member list
        checksum = zlib.crc32(struct.pack(f"={len(members)}I", *members))
        own = record.pack(block, signature, checksum)
        # context, rank that differs, kind of difference, blocks
        answer = struct.Struct(f"=Qii{len(members)}Q")
        if self.rank != leader:
            sent = self._post(own, leader, tag, sends=True)
            reply = bytearray(answer.size)
            received = self._post(reply, leader, tag, sends=False)
            self._wait(sent, leader, deadline, members, who, timeout)
            self._wait(received, leader, deadline, members, who, timeout)
            fields = answer.unpack(reply)
        else:
            records = {member: bytearray(own) for member in members}
            posted = [(m, self._post(records[m], m, tag, sends=False)) for m in members if m != leader]
            late = []
            for member, message in posted:
                try:
                    self._wait(message, member, deadline, members, who, timeout)
                except RankLate:
                    late.append(member)
            if late:
                raise self._late(late, members, who, timeout)
            told = [record.unpack(records[member]) for member in members]
            differs = next((r for r, each in enumerate(told) if each[1:] != told[0][1:]), -1)
            how = int(differs >= 0 and told[differs][2] != checksum)
            context = (self.rank + 1) << 32 | next(self._numbers)
            fields = (context, differs, how, *(each[0] for each in told))
            packed = bytearray(answer.pack(*fields))
            for member in members:
                if member != leader:
                    self._wait(
                        self._post(packed, member, tag, sends=True), member, deadline, members, who, timeout
                    )
        context, differs, how, *blocks = fields
        if differs >= 0:
            what = (
                "lists of members; pass the same list on all ranks"
                if how
                else "algorithms or tables of measurements; pass the same Options on all ranks"
            )
            raise ValueError(f"cannot create {who}: ranks 0 and {differs} were given different {what}")
        return context, list(blocks)

    def _open_group(self, context: int, members: Sequence[int], blocks: Sequence[int]) -> int:
        ranks, size = list(members), len(members)
        handle: int | None = self.core.frd_group_open(
            self._handle,
            context,
            ranks.index(self.rank),
            size,
            (ctypes.c_int * size)(*ranks),
            (ctypes.c_uint64 * size)(*blocks),
        )
        if not handle:
            raise MemoryError(
                "cannot allocate a group: out of memory; destroy unused groups, or stop other processes on this host"
            )
        return handle

    # ---- messages within the group of all ranks, which remains usable after errors ----

    def _post(
        self, data: bytes | bytearray, peer: int, tag: int, *, sends: bool
    ) -> tuple[int | None, object]:
        buffer = (ctypes.c_char * len(data)).from_buffer(
            data if isinstance(data, bytearray) else bytearray(data)
        )
        post = self.core.frd_post_send if sends else self.core.frd_post_recv
        message = post(self._base, buffer, len(data), _BYTE, peer, tag)
        if message is not None and message < LAST_STATUS:
            raise MemoryError("cannot allocate a message: out of memory; stop other processes on this host")
        return message, buffer

    def _wait(
        self,
        message: tuple[int | None, object],
        peer: int,
        deadline: float,
        members: Sequence[int],
        who: str,
        timeout: timedelta,
    ) -> None:
        if message[0] is None:
            return
        flags = TRY | (native.MAIN_THREAD if threading.current_thread() is threading.main_thread() else 0)
        left = max(0.0, deadline - time.monotonic())
        status = self.core.frd_message_wait(self._base, message[0], left, flags) & 0xFF
        if status == Status.OK:
            return
        if status == Status.PENDING:
            self.core.frd_message_cancel(self._base, message[0])
            raise self._late([peer], members, who, timeout)
        if status == Status.INTERRUPTED and flags & native.MAIN_THREAD:
            native.raise_pending_interrupt()
        process = self.processes[peer]
        raise CommunicationError(
            f"cannot create {who}: rank {list(members).index(peer)} (process {process.pid} on {process.name}) "
            f"{'left the job' if status == Status.LEFT else 'died'}; see the output of that rank"
        )

    def _late(self, late: Sequence[int], members: Sequence[int], who: str, timeout: timedelta) -> RankLate:
        numbers = ", ".join(str(list(members).index(member)) for member in late)
        return RankLate(
            f"cannot create {who}: {'rank' if len(late) == 1 else 'ranks'} {numbers} of {len(members)} did not arrive "
            f"within the timeout of {timeout.total_seconds():g} s"
        )

    # ---- shutdown ----

    def invalidate(self, reason: str) -> None:
        """Close the inherited sockets in a forked child."""
        handle, self._handle, self._base = self._handle, None, None
        if handle:
            self.core.frd_endpoint_forked(handle)

    def release(self) -> None:
        """Record that a group was closed; if no group remains, close the endpoint."""
        with self._lock:
            self._users -= 1
            if self._users or os.getpid() != self._owner:
                return
            handle, base, self._handle, self._base = self._handle, self._base, None, None
        if base:
            self.core.frd_close(base)
        if handle:
            self.core.frd_endpoint_close(handle)


def _by_host(processes: Sequence[Process]) -> list[list[int]]:
    """Return the ranks on each host; hosts are ordered by their lowest rank."""
    hosts: dict[str, list[int]] = {}
    for rank, process in enumerate(processes):
        hosts.setdefault(process.host, []).append(rank)
    return list(hosts.values())
