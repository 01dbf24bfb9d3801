"""Point-to-point work: messages of the C core as `torch.distributed.Work`."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from farandole.comm.dense import readable, writable
from farandole.comm.dtypes import TYPES
from farandole.comm.errors import CommunicationError, RankLate
from farandole.comm.host_group import HostGroup
from farandole.comm.work import FarandoleWork, OutcomeFuture, flags_here, seconds_of
from farandole.native import TRY, Status

ANY_RANK = -1


class MessageWork(FarandoleWork):
    """A send or a receive under way.  The core moves it along whether somebody waits or not."""

    def __init__(
        self,
        host: HostGroup,
        tensor: Tensor,
        peer: int,
        tag: int,
        *,
        sends: bool,
        done: Callable[[MessageWork], None],
    ) -> None:
        super().__init__([tensor])
        self._done = done
        with torch.no_grad():
            self._buffer = readable(tensor) if sends else writable(tensor)
        self._host = host
        self.sends = sends
        self._source = peer
        self._outcome: OutcomeFuture | None = None
        self._thread: threading.Thread | None = None  # that completes the future
        self._lock = threading.Lock()  # held by the thread that waits
        post = host.core.frd_post_send if sends else host.core.frd_post_recv
        size = self._buffer.numel() * self._buffer.element_size()
        self._message: int | None = post(
            host.handle, self._buffer.data_ptr(), size, TYPES[tensor.dtype], peer, tag, 1
        )
        if not self._message:
            raise MemoryError("no memory for a message")

    def is_completed(self) -> bool:
        """Whether a send may be changed again, or a receive is there, or has failed."""
        if self._message is None:
            return True
        if not self._lock.acquire(False):
            return False  # somebody waits for it
        try:
            if self._message is not None:
                status = self._host.core.frd_message_test(self._host.handle, self._message)
                if status == Status.PENDING:
                    return False
                with contextlib.suppress(CommunicationError):  # kept, for `wait`
                    self._settle(status)
            return True
        finally:
            self._lock.release()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message has moved; raise if its other end is gone or late.

        After `timeout` the message is still under way, and may be waited for again; after the timeout of
        the group it has failed.
        """
        seconds = seconds_of(timeout)
        if self._message is not None:
            if not self._lock.acquire(timeout=seconds if seconds is not None else -1):
                raise RankLate(f"the message was not complete within {seconds:g} s")
            try:
                if self._message is not None:
                    self._finish(seconds)
            finally:
                self._lock.release()
        if self._error is not None:
            raise self._error
        return True

    def _finish(self, seconds: float | None) -> None:
        core, handle, flags = self._host.core, self._host.handle, flags_here()
        if seconds is None:
            status = core.frd_message_wait(handle, self._message, self._host.timeout_s, flags)
        else:
            status = core.frd_message_wait(handle, self._message, seconds, flags | TRY)
        if status == Status.PENDING:
            raise RankLate(f"the message was not complete within {seconds:g} s")
        self._settle(status)

    def _settle(self, status: int) -> None:
        """Give the message back to the core, and keep what became of it."""
        core, message = self._host.core, self._message
        self._source = core.frd_message_source(message)
        core.frd_message_release(self._host.handle, message)
        try:
            self._host.check(status)
            if not self.sends and self._buffer is not self._tensors[0]:
                with torch.no_grad():
                    self._tensors[0].copy_(self._buffer)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._message = None  # from here on it is complete
            if self._thread is None:
                self._done(self)

    def withdraw(self) -> None:
        """Take back a message that has not moved, if nobody waits for it."""
        if self._message is not None and self._lock.acquire(False):
            try:
                if self._message is not None:
                    self._error = CommunicationError("the group was destroyed before the message came")
                    self._host.core.frd_message_release(self._host.handle, self._message)
                    self._message = None
                    self._done(self)
            finally:
                self._lock.release()

    def at_rest(self) -> bool:
        """Whether it is complete, and no thread of ours has anything to do with it."""
        return self.is_completed() and (self._thread is None or not self._thread.is_alive())

    def source_rank(self) -> int:
        """The rank in the group that a receive came from."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensor; a thread waits for the message."""
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
        with contextlib.suppress(CommunicationError):  # the future tells
            self.wait()
        self._outcome.complete()
        self._done(self)


class Messages:
    """The messages of one group that are under way; they must live until they have moved."""

    def __init__(self) -> None:
        self._open: dict[int, MessageWork] = {}
        self._closed = False
        self._gate = threading.Lock()  # held while messages come, go or change places

    def post(self, host: HostGroup, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> MessageWork:
        """Begin to send `tensor` to `peer`, or to receive it from there."""
        with self._gate:
            if self._closed:  # by another thread, since the caller looked
                raise CommunicationError(
                    "the group was destroyed; no message can be sent or received any more"
                )
            work = MessageWork(host, tensor, peer, tag, sends=sends, done=self._forget)
            self._open[id(work)] = work
            eldest = list(itertools.islice(self._open.values(), 2))
            for each in eldest:  # now the last in the row
                self._open[id(each)] = self._open.pop(id(each))
        for each in eldest:  # messages that nobody waits for: each new one looks at two, in turn
            each.is_completed()
        return work

    def _forget(self, work: MessageWork) -> None:
        with self._gate:
            self._open.pop(id(work), None)

    def close(self, patience_s: float) -> bool:
        """Take receives back, let sends arrive; False if some take longer than `patience_s`."""
        with self._gate:
            self._closed = True
            left = list(self._open.values())
        deadline = time.monotonic() + patience_s
        for work in left:
            while not work.at_rest():
                if not work.sends:
                    work.withdraw()
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        return True
