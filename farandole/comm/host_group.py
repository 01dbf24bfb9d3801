"""A group of ranks on one host: the C core's collectives on addresses, with errors that name ranks.

This is the layer below tensors: who is in the group, the shared segment, and status codes made into
exceptions.  `process_group.py` puts tensors and asynchronous work on top.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn

import torch

from farandole import native
from farandole.comm.describe import Roster, describe_call, describe_whereabouts, failure_to_error
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.errors import CommunicationError
from farandole.comm.host import Processes, Segment, SegmentName, open_and_map
from farandole.comm.verdict import Verdict
from farandole.native import Call, Failure, Status

SILENCE_S = 4.0
"""A host that lives acknowledges something every two seconds (`KEEPALIVE_S` in native/wire.c)."""

_processes = Processes()


class HostGroup:
    """The ranks of one group that are on this host.

    `members` are their numbers in the whole group, in which this one is `group_rank`; `rank` and `size` count
    on this host only, as the core's collectives do.  Messages go to any rank of the whole group.
    """

    def __init__(self, group_rank: int, members: Sequence[int], descriptor: int, roster: Roster) -> None:
        self.group_rank = group_rank
        self.members = list(members)
        self.rank = self.members.index(group_rank)
        self.size = len(members)
        self.roster = roster
        self.core = native.library()
        self.verdict: Verdict | None = None  # of a group of several hosts
        self._owner = os.getpid()
        self._closing = threading.RLock()  # for threads that use the handle outside of a call
        self._pids = [roster.pids[member] for member in members]
        watched = (ctypes.c_int * self.size)(*_processes.watch(self._pids))
        self.handle: int | None = self.core.frd_join(descriptor, self.rank, self.size, watched)
        if not self.handle:
            _processes.unwatch(self._pids)
            raise OSError("the shared segment of the group could not be mapped")
        self._remark = native.Remark(_weakly(self, HostGroup._say_who_is_late))
        self.core.frd_set_remark(self.handle, self._remark)
        self.core.frd_announce(self.handle, os.getpid())
        self._regions = 0
        self._left = False
        self._call_timeout_s: float | None = None  # of the collective under way, if it has its own

    def open_wires(
        self,
        listener: socket.socket,
        own: bytes,
        token: bytes,
        addresses: Mapping[int, bytes],
        verdict: Verdict,
    ) -> None:
        """Make ranks of other hosts reachable, at these addresses; the listening socket is the core's from now on."""
        ranks = len(self.roster.ranks)
        local_of = [self.members.index(r) if r in self.members else -1 for r in range(ranks)]
        failed = self.core.frd_span(self.handle, self.group_rank, ranks, (ctypes.c_int * ranks)(*local_of))
        failed = failed or self.core.frd_wires_open(self.handle, listener.detach(), own, len(own), token)
        for rank, address in addresses.items():
            failed = failed or self.core.frd_wires_address(self.handle, rank, address, len(address))
        if failed or self.core.frd_wires_start(self.handle):
            raise MemoryError("no memory, or no thread, for the connections of the group to other hosts")
        self.verdict = verdict

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a call waits for the other ranks."""
        self.timeout_s = timeout.total_seconds()
        self.core.frd_set_timeout(self.handle, self.timeout_s)

    def within(self, timeout_s: float, call: Callable[[int], None]) -> Callable[[int], None]:
        """A call with a timeout of its own."""

        def timed(flags: int) -> None:
            self._call_timeout_s = timeout_s
            self.core.frd_set_timeout(self.handle, timeout_s)
            try:
                call(flags)
            finally:
                self._call_timeout_s = None
                self.core.frd_set_timeout(self.handle, self.timeout_s)

        return timed

    def check(self, status: int) -> None:
        """Raise what a status code of the core stands for."""
        if status == Status.OK:
            return
        if status == Status.UNSUPPORTED:
            raise ValueError("the core does not have this reduction for this type of elements")
        failure = Failure()
        self.core.frd_get_failure(self.handle, ctypes.byref(failure))
        error = failure_to_error(failure, self.group_rank, self.roster, self.call_timeout_s)
        if self.verdict is not None:
            error = self._shared_reason(failure, error)
        if status == Status.INTERRUPTED and threading.current_thread() is threading.main_thread():
            native.raise_pending_interrupt()
        raise error

    def fail(self, error: CommunicationError, culprit: int) -> NoReturn:
        """Break the group on all its hosts, for a reason that was found out above the core, and raise it."""
        assert self.verdict is not None
        error = self.verdict.publish(error)
        self.core.frd_break(self.handle, culprit)
        self.core.frd_wires_hang_up(self.handle)
        raise error

    def _shared_reason(self, failure: Failure, error: CommunicationError) -> CommunicationError:
        """The reason that all hosts give; the connections are closed, so that all look for it."""
        assert self.verdict is not None
        found = None
        if failure.status in (Status.CLOSED, Status.ELSEWHERE, Status.MISFIT) or (
            failure.status == Status.LATE and failure.culprit not in self.members
        ):  # on the other host they may know better: why it closed, or for whom it waits itself
            found = self.verdict.find(failure.culprit if failure.status == Status.CLOSED else None)
        found = self.verdict.publish(found or self._with_link(failure, error))
        self.core.frd_wires_hang_up(self.handle)
        return found

    def _with_link(self, failure: Failure, error: CommunicationError) -> CommunicationError:
        """The error of a late rank on another host says whether that host still answers."""
        silence_s = self.core.frd_wires_silence(self.handle, failure.culprit)
        if failure.status != Status.LATE or silence_s < 0:
            return error
        return type(error)(f"{error}; {self._link_to(failure.culprit, silence_s)}")

    def _link_to(self, peer: int, silence_s: float) -> str:
        host = self.roster.hosts[peer]
        if silence_s > SILENCE_S:
            return f"{host} has given no sign of life for {silence_s:.0f} s: it is down, or the link to it is"
        return f"{host} answers, so the link to it is up"

    def whereabouts(self) -> str:
        """For a person: which ranks are behind this one, and in which calls."""
        calls = {member: Call() for member in self.members}
        with self._closing:
            if not self.handle:
                return "the group was destroyed meanwhile"
            for rank, call in enumerate(calls.values()):
                self.core.frd_get_call(self.handle, rank, ctypes.byref(call))
        return describe_whereabouts(calls, self.group_rank, self.roster)

    def _say_who_is_late(self) -> None:
        me = self.roster.rank(self.group_rank)
        print(f"farandole: {me} waits in {self.whereabouts()}", file=sys.stderr, flush=True)

    def late_peer(self, peer: int, waited_s: float) -> str:
        """For a person: that this rank waits for a message of rank `peer`."""
        own = Call()
        self.core.frd_get_call(self.handle, self.rank, ctypes.byref(own))
        me, other = self.roster.rank(self.group_rank), self.roster.rank(peer)
        text = f"{me} has waited {waited_s:.0f} s for {other} in {describe_call(own, self.roster)}"
        silence_s = self.core.frd_wires_silence(self.handle, peer)
        return f"{text}; {self._link_to(peer, silence_s)}" if silence_s >= 0 else text

    @property
    def call_timeout_s(self) -> float:
        """How long the call under way waits for the other ranks."""
        return self._call_timeout_s or self.timeout_s

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> torch.Tensor:
        """A tensor in memory that all ranks of the group can reach; every rank asks for the same."""
        length = _pages(shape, dtype)
        memory = self._share(length * self.size, flags)
        first = self.rank * length
        part = (ctypes.c_char * length).from_buffer(memory, first)
        self._add_region(part, ctypes.addressof(part) - first, length)
        return _tensor_in(part, shape, dtype)

    def allocate_common(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> torch.Tensor:
        """One tensor for all ranks of the group, in memory that they share; every rank asks for the same."""
        length = _pages(shape, dtype)
        return _tensor_in((ctypes.c_char * length).from_buffer(self._share(length, flags)), shape, dtype)

    def _add_region(self, part: ctypes.Array[ctypes.c_char], base: int, stride: int) -> None:
        """Have collectives reach the tensors of all ranks directly, as long as this rank's part lives."""
        number = self._regions
        self._regions += 1
        if self.core.frd_region_add(self.handle, number, base, stride):
            raise MemoryError("no memory to record a shared buffer")
        weakref.finalize(part, _forget_region, weakref.ref(self), number).atexit = False

    def _share(self, size: int, flags: int) -> mmap.mmap:
        """New memory of `size` bytes, mapped by all ranks.  OSError on all of them if one cannot have it."""
        own, memory, problem = None, None, ""
        try:
            try:
                own = None if self.rank else Segment(size, "buffer")
            except OSError as error:
                problem = str(error)
            name = torch.zeros(3, dtype=torch.int64)
            if own:
                name = torch.tensor([own.name.pid, own.name.descriptor, own.name.inode])
            kind = TYPES[name.dtype]
            self.check(self.core.frd_broadcast(self.handle, name.data_ptr(), name.numel(), kind, 0, flags))
            try:
                memory = open_and_map(SegmentName(*name.tolist()), size)
            except (OSError, ValueError) as error:
                problem = problem or str(error)
            failed = torch.tensor([int(bool(problem))])
            most = REDUCTION_NAMES.index("max")
            self.check(self.core.frd_all_reduce(self.handle, failed.data_ptr(), 1, kind, most, flags))
        finally:
            if own:
                own.close()
        if memory is None or failed.item():
            raise OSError(f"no shared buffer of {size} bytes: {problem or 'another rank could not map it'}")
        return memory

    def leave(self, note: str) -> None:
        """Tell the others that this rank makes no further call."""
        if os.getpid() != self._owner:
            return
        with self._closing:
            if not self.handle or self._left:
                return
            self._left = True
        if self.verdict is not None:
            self.verdict.leave(f"{self.roster.rank(self.group_rank)} left {self.roster.group} ({note})")
        with self._closing:
            if self.handle:
                self.core.frd_leave(self.handle, note.encode()[: native.NOTE_BYTES - 1])

    def give_up(self) -> None:
        """Leave, and have this process's calls under way return, with an error."""
        if os.getpid() != self._owner:
            return
        with self._closing:
            if self.handle:
                self.core.frd_give_up(self.handle)

    def close(self) -> None:
        """Leave, and give the memory back.  No call may be under way."""
        if os.getpid() != self._owner:
            return
        self.leave("it destroyed the group")
        with self._closing:
            if not self.handle:
                return
            handle, self.handle = self.handle, None
            self.core.frd_close(handle)
        _processes.unwatch(self._pids)


def _pages(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes of a tensor, in whole pages; one at least."""
    page = os.sysconf("SC_PAGE_SIZE")
    return max(1, -(-math.prod(shape) * dtype.itemsize // page)) * page


def _tensor_in(part: ctypes.Array[ctypes.c_char], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in mapped memory.  It keeps `part`, and that keeps the mapping: when the tensor goes, so does this."""
    elements = math.prod(shape)
    if not elements:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(part, dtype=dtype, count=elements).view(*shape)


def _weakly(group: HostGroup, method: Callable[[HostGroup], None]) -> Callable[[], None]:
    """A function for the core to call, that does not keep the group alive."""
    reference = weakref.ref(group)

    def call() -> None:
        alive = reference()
        if alive is not None:
            method(alive)

    return call


def _forget_region(group: weakref.ref[HostGroup], number: int) -> None:
    alive = group()
    if alive is not None:
        with alive._closing:
            if alive.handle:
                alive.core.frd_region_remove(alive.handle, number)
