"""Point-to-point messages as `torch.distributed.Work` objects."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from farandole._troubleshooting import see
from farandole.comm.dense import is_dense, readable, separate_elements, writable
from farandole.comm.dtypes import TYPES
from farandole.comm.errors import CommunicationError, RankLate
from farandole.comm.work import CompletedWork, FarandoleWork, OutcomeFuture, flags_here, seconds_of
from farandole.native import TRY, Status

_PENDING = int(Status.PENDING)  # comparing with an enum member is slower
FEW = 8
"""If more messages than this are pending, posting a message also tests the oldest messages for completion."""


class MessagePassing(Protocol):
    """The interface for messages within a group, implemented by the C core and by MPI.

    A message is described by the address and the size of its memory, by the C core's number for its dtype (`kind`), by
    a peer and by a tag.  `post_send` and `post_recv` return a message object, or None if a send is already complete.
    `send`, `recv`, `test_message` and `wait_message` return the outcome of a message: `Status.PENDING`, success, or a
    failure, which `source_of` raises.  After any outcome other than `Status.PENDING`, the message object must not be used
    again.
    """

    timeout_s: float
    largest_tag: int

    def post_send(self, address: int, nbytes: int, kind: int, peer: int, tag: int) -> Any:
        """Post a send of `nbytes` bytes to rank `peer`."""

    def post_recv(self, address: int, nbytes: int, kind: int, peer: int, tag: int) -> Any:
        """Post a receive of `nbytes` bytes from rank `peer`, or from any rank if `peer` is -1."""

    def send(self, address: int, nbytes: int, kind: int, peer: int, tag: int, flags: int) -> Any:
        """Send `nbytes` bytes and block until the buffer may be modified; return the outcome, 0 for success."""

    def recv(self, address: int, nbytes: int, kind: int, peer: int, tag: int, flags: int) -> Any:
        """Receive `nbytes` bytes and block until they have arrived; return the outcome."""

    def test_message(self, message: Any) -> Any:
        """Return the outcome of a message, or `Status.PENDING`."""

    def wait_message(self, message: Any, seconds: float, flags: int) -> Any:
        """Wait up to `seconds` seconds for `message` and return its outcome.

        If the message is then still pending, the outcome is `Status.PENDING` if `flags` contains `TRY`, else a failure.
        """

    def cancel_message(self, message: Any) -> None:
        """Cancel a message whose transfer has not started."""

    def source_of(self, outcome: Any) -> int:
        """Return the source rank of a completed message; raise an exception if the message failed."""


def valid_tag(call: str, tag: int, largest: int) -> None:
    """Raise ValueError unless `tag` is between 0 and `largest`."""
    if not 0 <= tag <= largest:
        raise ValueError(f"{call}: expected a tag between 0 and {largest}, got {tag}")


class MessageWork(FarandoleWork):
    """A send or receive that progresses even if no thread waits for it."""

    _outcome: OutcomeFuture | None = None
    _thread: threading.Thread | None = None  # completes the future

    def __init__(
        self,
        host: MessagePassing,
        message: Any,
        tensor: Tensor,
        buffer: Tensor,
        peer: int,
        sends: bool,
        done: Callable[[MessageWork], object],
    ) -> None:
        # does not call the base class constructor: construction is most of the cost of a small message
        Work.__init__(self)
        self._tensors = [tensor]
        self.sends = sends
        self._host, self._message, self._buffer = host, message, buffer
        self._source = peer
        self._done = done
        self._lock = _thread.allocate_lock()  # held by the waiting thread

    def is_completed(self) -> bool:
        """Return whether the message is complete or has failed."""
        if self._message is None:
            return True
        if not self._lock.acquire(False):
            return False  # another thread waits for the message
        try:
            if self._message is not None:
                outcome = self._host.test_message(self._message)
                if outcome == _PENDING:
                    return False
                with contextlib.suppress(CommunicationError):  # `wait` raises the error
                    self._complete(outcome)
            return True
        finally:
            self._lock.release()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is complete; raise an exception if the peer has died or is late.

        If `timeout` expires, the message remains pending, and `wait` may be called again.  If the group's timeout
        expires, the message fails.
        """
        if self._message is not None:
            seconds, host = None if timeout is None else seconds_of(timeout), self._host
            if not (self._lock.acquire() if seconds is None else self._lock.acquire(timeout=seconds)):
                raise RankLate(
                    f"the message did not complete within the timeout of {seconds:g} s and is still pending; wait again"
                )
            try:
                if self._message is None:
                    pass  # another thread completed the message meanwhile
                elif seconds is None:
                    self._complete(host.wait_message(self._message, host.timeout_s, flags_here()))
                else:
                    outcome = host.wait_message(self._message, seconds, flags_here() | TRY)
                    if outcome == _PENDING:
                        raise RankLate(
                            f"the message did not complete within the timeout of {seconds:g} s and is still pending; "
                            "wait again"
                        )
                    self._complete(outcome)
            finally:
                self._lock.release()
        if self._error is not None:
            raise self._error
        return True

    def _complete(self, outcome: Any) -> None:
        """Store the outcome and copy received data to the tensor; raise an exception if the message failed."""
        try:
            self._source = self._host.source_of(outcome)
            if not self.sends and self._buffer is not self._tensors[0]:
                with torch.no_grad():
                    self._tensors[0].copy_(self._buffer)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._message = None  # marks the message as complete
            if self._thread is None:
                self._done(self)

    def withdraw(self) -> None:
        """Cancel this message because the group is being destroyed, unless a thread is waiting for the message."""
        if self._message is not None and self._lock.acquire(False):
            try:
                if self._message is not None:
                    self._error = CommunicationError(
                        f"the group was destroyed before the message arrived{see('the-group-was-destroyed')}"
                    )
                    self._host.cancel_message(self._message)
                    self._message = None
                    self._done(self)
            finally:
                self._lock.release()

    def fail(self, error: CommunicationError) -> None:
        """Mark the message as failed without calling the C core or MPI."""
        self._lock = _thread.allocate_lock()  # the thread that held the lock may not exist in this process
        if self._message is not None:
            self._message, self._error = None, error

    def at_rest(self) -> bool:
        """Return whether the message is complete and no thread is using it."""
        return self.is_completed() and (self._thread is None or not self._thread.is_alive())

    def source_rank(self) -> int:
        """Return the group rank from which the message was received."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is a list that contains the tensor.

        If the message is still pending, a separate thread waits for it.
        """
        if self._outcome is None:
            self._outcome = OutcomeFuture(self)
            if self.is_completed():
                self._outcome.complete()
            else:
                self._thread = threading.Thread(
                    target=self._complete_future, name="farandole-message", daemon=True
                )
                self._thread.start()
        return self._outcome.future

    def _complete_future(self) -> None:
        assert self._outcome is not None
        with contextlib.suppress(CommunicationError):  # the future raises the error
            self.wait()
        self._outcome.complete()
        self._done(self)


class Messages:
    """The pending messages of one group.  The tensor of a message stays alive until the message is complete."""

    def __init__(self, host: MessagePassing) -> None:
        self._host = host
        self.largest_tag = host.largest_tag
        self._open: dict[int, MessageWork] = {}
        self._blocked: dict[int, None] = {}  # threads in blocking sends and receives
        self._closed = ""  # the reason why messages cannot be posted, or ""

    def post(self, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> FarandoleWork:
        """Start a send of `tensor` to `peer` if `sends` is set, else a receive from `peer`; return the work."""
        if self._closed:
            raise CommunicationError(self._closed)
        valid_tag("send" if sends else "recv", tag, self.largest_tag)
        buffer = tensor
        if not is_dense(tensor):
            if not sends:
                separate_elements("recv", [tensor])
            with torch.no_grad():
                buffer = readable(tensor) if sends else writable(tensor)
        nbytes = buffer.numel() * buffer.element_size()
        return self.begin(tensor, buffer, buffer.data_ptr(), nbytes, TYPES[tensor.dtype], peer, tag, sends)

    def begin(
        self,
        tensor: Tensor,
        buffer: Tensor,
        address: int,
        nbytes: int,
        kind: int,
        peer: int,
        tag: int,
        sends: bool,
    ) -> FarandoleWork:
        """Start a send or a receive of the dense tensor `buffer`; return the work.

        `buffer` is `tensor` itself or a dense copy.  A received `buffer` is copied to `tensor` when the message is
        complete.
        """
        if self._closed:
            raise CommunicationError(self._closed)
        host, opened = self._host, self._open
        if sends:
            message = host.post_send(address, nbytes, kind, peer, tag)
            if message is None:
                return CompletedWork((tensor,))
        else:
            message = host.post_recv(address, nbytes, kind, peer, tag)
        work = MessageWork(host, message, tensor, buffer, peer, sends, self._forget)
        opened[id(work)] = work
        if len(opened) > FEW:  # test the two oldest messages, for which no thread may be waiting
            for key in list(itertools.islice(opened, 2)):
                eldest = opened.pop(key, None)
                if eldest is not None and not eldest.is_completed():
                    opened[key] = eldest  # move to the end
        if self._is_closed():  # another thread has closed the group meanwhile
            work.withdraw()
        return work

    def send(self, address: int, nbytes: int, kind: int, peer: int, tag: int) -> bool:
        """Send bytes to `peer` and block until the buffer may be modified; return True."""
        return self._block(self._host.send, address, nbytes, kind, peer, tag)

    def recv(self, address: int, nbytes: int, kind: int, peer: int, tag: int) -> bool:
        """Receive bytes from `peer` and block until they have arrived; return True."""
        return self._block(self._host.recv, address, nbytes, kind, peer, tag)

    def _block(
        self, call: Callable[..., Any], address: int, nbytes: int, kind: int, peer: int, tag: int
    ) -> bool:
        thread, blocked = _thread.get_ident(), self._blocked
        blocked[thread] = None
        try:
            if self._closed:
                raise CommunicationError(self._closed)
            if outcome := call(address, nbytes, kind, peer, tag, flags_here()):
                self._host.source_of(outcome)
            return True
        finally:
            del blocked[thread]

    def _is_closed(self) -> bool:
        return bool(self._closed)

    def _forget(self, work: MessageWork) -> None:
        self._open.pop(id(work), None)

    def invalidate(self, reason: str) -> None:
        """Fail all messages in a forked child, because they belong to the parent."""
        self._closed = reason
        for work in self._open.values():
            work.fail(CommunicationError(reason))
        self._open, self._blocked = {}, {}

    def close(self, patience_s: float) -> bool:
        """Cancel pending receives and complete pending sends; return False if `patience_s` seconds pass first."""
        self._closed = "the group was destroyed and cannot send or receive messages"
        deadline = time.monotonic() + patience_s
        for work in list(self._open.values()):
            while not work.at_rest():
                if not work.sends:
                    work.withdraw()
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        own = _thread.get_ident()
        while any(thread != own for thread in list(self._blocked)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True
