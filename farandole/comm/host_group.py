"""A group of ranks on one host: the C core's collectives on addresses, with errors that name ranks.

This is the layer below tensors: who is in the group, the shared segment, and status codes made into
exceptions.  `process_group.py` puts tensors and asynchronous work on top.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from farandole import native
from farandole.comm.describe import Roster, describe_whereabouts, failure_to_error
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.host import (
    Meeting,
    Peer,
    Processes,
    Segment,
    SegmentName,
    host_identity,
    open_and_map,
    open_segment,
)
from farandole.native import Call, Failure, Status

_processes = Processes()


class NotOnOneHost(Exception):
    """The ranks of a group cannot share memory; the message says why."""


class HostGroup:
    """The ranks of one group, all on this host.  Made by every rank at once with `meet`."""

    def __init__(self, rank: int, pids: Sequence[int], descriptor: int, roster: Roster) -> None:
        self.rank = rank
        self.size = len(pids)
        self.roster = roster
        self.core = native.library()
        self._owner = os.getpid()
        self._pids = list(pids)
        watched = (ctypes.c_int * self.size)(*_processes.watch(pids))
        self.handle: int | None = self.core.frd_join(descriptor, rank, self.size, watched)
        if not self.handle:
            _processes.unwatch(self._pids)
            raise OSError("the shared segment of the group could not be mapped")
        self.core.frd_announce(self.handle, os.getpid())
        self._regions = 0
        self._call_timeout_s: float | None = None  # of the collective under way, if it has its own

    @classmethod
    def meet(
        cls,
        meeting: Meeting,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_ranks: Sequence[int],
    ) -> HostGroup:
        """Make it with the other ranks.  `NotOnOneHost`, on all ranks alike, if memory cannot be shared."""
        reason = native.why_unavailable()
        if size > native.MAX_RANKS:
            reason = f"{size} ranks are more than the {native.MAX_RANKS} that one segment serves"
        own = None if rank or reason else Segment(native.library().frd_segment_bytes(size), "group")
        try:
            mine = Peer(f"{host_identity()}|{reason or ''}", os.getpid(), own.name if own else None)
            peers = meeting.exchange_peers(mine)
            if reasons := [peer.host.split("|")[1] for peer in peers if not peer.host.endswith("|")]:
                raise NotOnOneHost(reasons[0])
            if hosts := {peer.host for peer in peers} - {mine.host}:
                raise NotOnOneHost(f"its {size} ranks are on {len(hosts) + 1} hosts")
            roster = Roster(name, global_ranks, [peer.pid for peer in peers])
            group, problem = cls._try_join(rank, peers, roster)
            problems = meeting.exchange("joined", problem)
        finally:
            if own:
                own.close()
        for r, problem in enumerate(problems):
            if problem:
                if group:
                    group.close()
                raise NotOnOneHost(f"rank {r} cannot open the memory of rank 0: {problem}")
        assert group is not None
        group.set_timeout(timeout)
        return group

    @classmethod
    def _try_join(cls, rank: int, peers: Sequence[Peer], roster: Roster) -> tuple[HostGroup | None, str]:
        assert peers[0].segment is not None
        try:
            descriptor = open_segment(peers[0].segment)
            try:
                return cls(rank, [peer.pid for peer in peers], descriptor, roster), ""
            finally:
                os.close(descriptor)
        except OSError as error:
            return None, str(error)

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
        if status == Status.INTERRUPTED and threading.current_thread() is threading.main_thread():
            native.raise_pending_interrupt()
        if status == Status.UNSUPPORTED:
            raise ValueError("the core does not have this reduction for this type of elements")
        failure = Failure()
        self.core.frd_get_failure(self.handle, ctypes.byref(failure))
        raise failure_to_error(failure, self.rank, self.roster, self._call_timeout_s or self.timeout_s)

    def whereabouts(self) -> str:
        """For a person: which ranks are behind this one, and in which calls."""
        calls = [Call() for _ in range(self.size)]
        for rank, call in enumerate(calls):
            self.core.frd_get_call(self.handle, rank, ctypes.byref(call))
        return describe_whereabouts(calls, self.rank, self.roster)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> torch.Tensor:
        """A tensor in memory that all ranks of the group can reach; every rank asks for the same."""
        elements = 1
        for length in shape:
            elements *= length
        page = os.sysconf("SC_PAGE_SIZE")
        stride = max(1, -(-elements * dtype.itemsize // page)) * page
        memory = self._share(stride * self.size, flags)
        part = (ctypes.c_char * stride).from_buffer(memory, self.rank * stride)
        base = ctypes.addressof(part) - self.rank * stride
        number = self._regions
        self._regions += 1
        if self.core.frd_region_add(self.handle, number, base, stride):
            raise MemoryError("no memory to record a shared buffer")
        # the tensor keeps `part`, and that keeps the mapping; when the tensor goes, so do they
        weakref.finalize(part, _forget_region, weakref.ref(self), number).atexit = False
        return (
            torch.frombuffer(part, dtype=dtype, count=elements).view(*shape)
            if elements
            else torch.empty(*shape, dtype=dtype)
        )

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
        if self.handle and os.getpid() == self._owner:
            self.core.frd_leave(self.handle, note.encode()[: native.NOTE_BYTES - 1])

    def give_up(self) -> None:
        """Leave, and have this process's calls under way return, with an error."""
        if self.handle and os.getpid() == self._owner:
            self.core.frd_give_up(self.handle)

    def close(self) -> None:
        """Leave, and give the memory back.  No call may be under way."""
        if not self.handle or os.getpid() != self._owner:
            return
        self.leave("it destroyed the group")
        handle, self.handle = self.handle, None
        self.core.frd_close(handle)
        _processes.unwatch(self._pids)


def _forget_region(group: weakref.ref[HostGroup], number: int) -> None:
    alive = group()
    if alive is not None and alive.handle:
        alive.core.frd_region_remove(alive.handle, number)
