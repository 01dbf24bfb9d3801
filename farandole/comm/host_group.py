"""The ranks of a group on this host, and C core operations on memory addresses.

This layer manages membership and shared memory, and converts status codes to exceptions that name ranks.  `core.py`
adds tensors, and `work.py` adds asynchronous calls.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_double, c_size_t, c_void_p
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from farandole import native
from farandole.comm.describe import (
    Membership,
    describe_call,
    describe_stall,
    describe_stalled_message,
    describe_whereabouts,
    failure_to_error,
    with_own_call,
)
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.ending import remember_failure, with_cause
from farandole.comm.errors import CommunicationError
from farandole.comm.failure_consensus import FailureConsensus
from farandole.comm.host import Segment, SegmentName, open_and_map
from farandole.comm.notices import warn
from farandole.native import Call, Failure, Status

if TYPE_CHECKING:
    from farandole.comm.endpoint import Endpoint

_NOTICEABLE_SILENCE_S = 3.0
"""Seconds after which a silent host is reported as unreachable.

A running host acknowledges a probe every 2 s (`KEEPALIVE_S` in native/handshake.c).
"""


class HostGroup:
    """The ranks of one group on this host.

    `members` lists the group ranks of the processes on this host, and `group_rank` is this process's rank in the
    group.  `rank` and `size` refer to this host only, and the C core's collectives run only on this host.  Messages
    can be sent to any rank in the group.
    """

    largest_tag = 2**31 - 1

    def __init__(
        self,
        endpoint: Endpoint,
        handle: int,
        group_rank: int,
        members: Sequence[int],
        membership: Membership,
        consensus: FailureConsensus | None,
        store: dist.Store,
    ) -> None:
        self.endpoint = endpoint
        self.handle: int | None = handle
        self.group_rank = group_rank
        self.members = list(members)
        self.rank = self.members.index(group_rank)
        self.size = len(members)
        self.membership = membership
        self.consensus = consensus  # None if the group is on one host
        self.store = store
        self.core = native.library()
        self._owner = os.getpid()
        self._closing = threading.RLock()  # protects the handle outside of calls
        self._stall_warning = native.StallWarning(_weakly(self, HostGroup._warn_of_stall))
        self.core.frd_set_stall_warning(self.handle, self._stall_warning)
        self._group = c_void_p(handle)
        # indexing returns functions without argument types, so ctypes does not convert arguments
        self._post_send, self._post_recv = self.core["frd_post_send"], self.core["frd_post_recv"]
        self._post_send.restype = self._post_recv.restype = c_void_p
        self._send, self._recv = self.core["frd_send"], self.core["frd_recv"]
        self._wait_message, self._test_message = self.core["frd_message_wait"], self.core["frd_message_test"]
        self._left = False
        self._call_timeout_s: float | None = (
            None  # the current collective's timeout if it differs from `timeout_s`
        )

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may wait for other ranks."""
        self.timeout = timeout
        self.timeout_s = timeout.total_seconds()
        with self._closing:
            if self.handle:
                self.core.frd_set_timeout(self.handle, self.timeout_s)

    def within(self, timeout_s: float, call: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that runs the collective `call` with a timeout of `timeout_s` seconds instead of `self.timeout`."""

        def timed(flags: int) -> None:
            self._call_timeout_s = timeout_s
            self.core.frd_set_call_timeout(self.handle, timeout_s)
            try:
                call(flags)
            finally:
                self._call_timeout_s = None
                self.core.frd_set_call_timeout(self.handle, self.timeout_s)

        return timed

    def check(self, status: int) -> None:
        """Raise the exception for a status code of the C core; do nothing for `Status.OK`."""
        if status == Status.OK:
            return
        if status == Status.UNSUPPORTED:
            raise ValueError(
                "the C core does not support this reduction for this dtype; convert the tensor to another dtype"
            )
        if status == Status.NO_MEMORY:
            raise MemoryError(
                "cannot allocate shared memory for a collective; free tensors created by `Communicator.empty`"
            )
        if status == Status.INVALID:
            raise ValueError(
                f"expected a root or peer between 0 and {self.size - 1}, got a rank outside the group"
            )
        failure = Failure()
        self.core.frd_get_failure(self.handle, ctypes.byref(failure))
        error = failure_to_error(failure, self.group_rank, self.membership)
        if self.consensus is not None:
            error = self._shared_reason(failure, error)
        own = Call()
        self.core.frd_get_call(self.handle, self.rank, ctypes.byref(own))
        remember_failure(error, bytes(failure.note).split(b"\0")[0].decode(errors="replace"))
        error = with_own_call(error, failure, own, self.membership)
        if status == Status.INTERRUPTED and threading.current_thread() is threading.main_thread():
            native.raise_pending_interrupt()
        raise error

    # ---- messages: see `messages.MessagePassing` ----

    def post_send(self, address: int, nbytes: int, kind: int, peer: int, tag: int) -> int | None:
        """Start sending `nbytes` bytes to rank `peer`; return the message, or None if the send is already complete."""
        return self._posted(
            self._post_send(self._group, c_void_p(address), c_size_t(nbytes), kind, peer, tag)
        )

    def post_recv(self, address: int, nbytes: int, kind: int, peer: int, tag: int) -> int | None:
        """Post a receive of `nbytes` bytes from rank `peer`, or from any rank if `peer` is -1."""
        return self._posted(
            self._post_recv(self._group, c_void_p(address), c_size_t(nbytes), kind, peer, tag)
        )

    def _posted(self, message: int | None) -> int | None:
        if message is not None and message < native.LAST_STATUS:
            self.check(message)
        return message

    def send(self, address: int, nbytes: int, kind: int, peer: int, tag: int, flags: int) -> int:
        """Send `nbytes` bytes to rank `peer` and block until the buffer may be modified; return the outcome."""
        outcome: int = self._send(self._group, c_void_p(address), c_size_t(nbytes), kind, peer, tag, flags)
        return outcome

    def recv(self, address: int, nbytes: int, kind: int, peer: int, tag: int, flags: int) -> int:
        """Receive `nbytes` bytes from rank `peer` and block until they have arrived; return the outcome."""
        outcome: int = self._recv(self._group, c_void_p(address), c_size_t(nbytes), kind, peer, tag, flags)
        return outcome

    def test_message(self, message: int) -> int:
        """Return the outcome of a message, or `Status.PENDING`."""
        outcome: int = self._test_message(self._group, c_void_p(message))
        return outcome

    def wait_message(self, message: int, seconds: float, flags: int) -> int:
        """Wait up to `seconds` seconds for `message` and return its outcome.

        If the message is then still pending, the outcome is `Status.PENDING` if `flags` contains `TRY`, else a failure.
        """
        outcome: int = self._wait_message(self._group, c_void_p(message), c_double(seconds), flags)
        return outcome

    def cancel_message(self, message: int) -> None:
        """Cancel a message whose transfer has not started."""
        self.core.frd_message_cancel(self.handle, message)

    def source_of(self, outcome: int) -> int:
        """Return the source rank of a completed message; raise an exception if the message failed."""
        if outcome & 0xFF:
            self.check(outcome & 0xFF)
        return outcome >> 8

    def fail(self, error: CommunicationError, culprit: int) -> NoReturn:
        """Mark the group as failed on all hosts, and raise the exception on which all hosts agree.

        Args:
            error: A failure that was detected outside the C core.  It is raised unless another host has already
                published a failure.
            culprit: The rank that caused the failure.
        """
        assert self.consensus is not None
        error = self.consensus.publish(error)
        self.core.frd_break(self.handle, culprit)
        self.core.frd_tell_broken(self.handle)
        raise error

    def _shared_reason(self, failure: Failure, error: CommunicationError) -> CommunicationError:
        """Notify the other hosts of the failure; return the exception on which all hosts agree."""
        assert self.consensus is not None
        found = None
        late_elsewhere = failure.status == Status.LATE and failure.culprit not in self.members
        if late_elsewhere or failure.status in (Status.CLOSED, Status.ELSEWHERE, Status.PART_COUNT_MISMATCH):
            # another host may have published the cause
            found = self.consensus.find(failure.culprit if failure.status == Status.CLOSED else None)
        found = self.consensus.publish(found or self._with_link(failure, error))
        self.core.frd_tell_broken(self.handle)
        return found

    def _with_link(self, failure: Failure, error: CommunicationError) -> CommunicationError:
        """Return `error`; if it reports a late rank on another host, append whether that host responds."""
        silence_s = self.core.frd_silence(self.handle, failure.culprit)
        if failure.status != Status.LATE or silence_s < 0:
            return error
        return type(error)(f"{error}; {self._link_to(failure.culprit, silence_s)}")

    def _link_to(self, peer: int, silence_s: float) -> str:
        host = self.membership.hosts[peer]
        if silence_s > _NOTICEABLE_SILENCE_S:
            return f"{host} has not responded for {silence_s:.0f} s, so the host or its network link is down"
        return f"{host} responds, so its network link is up"

    def whereabouts(self) -> str:
        """Describe the current call, and list the ranks on this host that have not started it."""
        calls = {member: Call() for member in self.members}
        with self._closing:
            if not self.handle:
                return "the group was destroyed during the call"
            for rank, call in enumerate(calls.values()):
                self.core.frd_get_call(self.handle, rank, ctypes.byref(call))
        return describe_whereabouts(calls, self.group_rank, self.membership)

    def _warn_of_stall(self, waited_s: float, timeout_s: float) -> None:
        call = self._waited_message(self.group_rank)
        if call:
            text = describe_stalled_message(call, self.group_rank, self._waited_message, self.membership)
        else:
            text = self.whereabouts()
        if text:
            warn(describe_stall(self.membership.rank(self.group_rank), waited_s, timeout_s, f"in {text}"))

    def _waited_message(self, rank: int) -> Call | None:
        """Return the send or receive that `rank` is waiting for; None if there is none or `rank` is on another host."""
        call = Call()
        with self._closing:
            if not self.handle or rank not in self.members:
                return None
            waits = self.core.frd_get_wait(self.handle, self.members.index(rank), ctypes.byref(call))
        return call if waits else None

    def late_peer(self, peer: int, waited_s: float, timeout_s: float) -> str:
        """Return the stall warning for a message between this rank and rank `peer`."""
        own = Call()
        self.core.frd_get_call(self.handle, self.rank, ctypes.byref(own))
        text = f"for {self.membership.rank(peer)} in {describe_call(own, self.membership)}"
        silence_s = self.core.frd_silence(self.handle, peer)
        if silence_s >= 0:
            text += f"; {self._link_to(peer, silence_s)}"
        return describe_stall(self.membership.rank(self.group_rank), waited_s, timeout_s, text)

    @property
    def call_timeout_s(self) -> float:
        """The timeout of the current collective, in seconds."""
        return self._call_timeout_s or self.timeout_s

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> torch.Tensor:
        """Return a tensor in this process's arena, which all ranks of this host map."""
        length = math.prod(shape) * dtype.itemsize
        if not length:
            return torch.empty(*shape, dtype=dtype, device="cpu")
        address = self.core.frd_alloc(length)
        if not address:
            raise OSError(
                f"cannot allocate {length} bytes of shared memory: {self.core.frd_arena_used()} of the "
                f"{self.core.frd_arena_bytes()} bytes of this process's arena are in use; free tensors created by "
                "`empty`"
            )
        part = (ctypes.c_char * length).from_address(address)
        weakref.finalize(part, self.core.frd_free, address).atexit = False
        return _tensor_in(part, shape, dtype)

    def allocate_shared(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> torch.Tensor:
        """Return a tensor of zeros in memory shared by all ranks; every rank must pass the same arguments."""
        length = _pages(shape, dtype)
        return _tensor_in((ctypes.c_char * length).from_buffer(self._share(length, flags)), shape, dtype)

    def _share(self, size: int, flags: int) -> mmap.mmap:
        """Allocate `size` bytes that all ranks map; raise OSError on all ranks if any rank fails."""
        own, memory, problem = None, None, ""
        try:
            try:
                own = None if self.rank else Segment(size, "buffer")
            except OSError as error:
                problem = str(error)
            name = torch.zeros(3, dtype=torch.int64, device="cpu")
            if own:
                name = torch.tensor([own.name.pid, own.name.descriptor, own.name.inode], device="cpu")
            kind = TYPES[name.dtype]
            self.check(self.core.frd_broadcast(self.handle, name.data_ptr(), name.numel(), kind, 0, flags))
            try:
                memory = open_and_map(SegmentName(*name.tolist()), size)
            except (OSError, ValueError) as error:
                problem = problem or str(error)
            failed = torch.tensor([int(bool(problem))], device="cpu")
            most = REDUCTION_NAMES.index("max")
            self.check(self.core.frd_all_reduce(self.handle, failed.data_ptr(), 1, kind, most, flags))
        finally:
            if own:
                own.close()
        if memory is None or failed.item():
            raise OSError(
                f"cannot allocate {size} bytes of shared memory: {problem or 'another rank cannot map the memory'}"
            )
        return memory

    def leave(self, note: str) -> None:
        """Notify the other ranks that this rank will make no further calls."""
        if os.getpid() != self._owner:
            return
        with self._closing:
            if not self.handle or self._left:
                return
            self._left = True
        note = with_cause(note)
        if self.consensus is not None:
            self.consensus.leave(
                f"{self.membership.rank(self.group_rank)} left {self.membership.group} ({note})"
            )
        with self._closing:
            if self.handle:
                self.core.frd_leave(self.handle, note.encode()[: native.NOTE_BYTES - 1])

    def give_up(self) -> None:
        """Leave the group and fail the pending calls of this process."""
        if os.getpid() != self._owner:
            return
        with self._closing:
            if self.handle:
                self.core.frd_give_up(self.handle)

    def close(self) -> None:
        """Leave the group and free its memory; no call may be pending."""
        if os.getpid() != self._owner:
            return
        self.leave("it destroyed the group")
        with self._closing:
            if not self.handle:
                return
            handle, self.handle = self.handle, None
            self.core.frd_close(handle)
        self.endpoint.release()


def _pages(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size of a tensor in bytes, rounded up to a whole number of pages (at least one)."""
    page = os.sysconf("SC_PAGE_SIZE")
    return max(1, -(-math.prod(shape) * dtype.itemsize // page)) * page


def _tensor_in(part: ctypes.Array[ctypes.c_char], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the memory `part`; the tensor keeps this memory alive."""
    elements = math.prod(shape)
    if not elements:
        return torch.empty(*shape, dtype=dtype, device="cpu")
    return torch.frombuffer(part, dtype=dtype, count=elements).view(*shape)


def _weakly(
    group: HostGroup, method: Callable[[HostGroup, float, float], None]
) -> Callable[[float, float], None]:
    """Return a callback that calls `method` with `group`, but does not keep `group` alive."""
    reference = weakref.ref(group)

    def call(waited_s: float, timeout_s: float) -> None:
        alive = reference()
        if alive is not None:
            method(alive, waited_s, timeout_s)

    return call
