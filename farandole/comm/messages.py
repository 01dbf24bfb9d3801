"""Point-to-point work: messages of the C core as `torch.distributed.Work`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from farandole.comm.dtypes import TYPES
from farandole.comm.host_group import HostGroup
from farandole.comm.work import LaneFuture, _callbacks, _FarandoleWork, flags_here
from farandole.native import Status


class MessageWork(_FarandoleWork):
    """A send or a receive under way.  The core moves it along whether somebody waits or not."""

    def __init__(self, group: HostGroup, tensor: torch.Tensor, peer: int, tag: int, *, sends: bool) -> None:
        super().__init__([tensor])
        self._group = group
        self._buffer = tensor if tensor.is_contiguous() else tensor.contiguous()
        self._sends = sends
        self._future: LaneFuture | None = None
        post = group.core.frd_post_send if sends else group.core.frd_post_recv
        size = self._buffer.numel() * self._buffer.element_size()
        self._message: int | None = post(
            group.handle, self._buffer.data_ptr(), size, TYPES[tensor.dtype], peer, tag, 1
        )
        if not self._message:
            raise MemoryError("no memory for a message")
        self._source = peer

    def is_completed(self) -> bool:
        """Whether a send may be changed again, or a receive is there."""
        if self._message is None:
            return True
        return bool(self._group.core.frd_message_test(self._group.handle, self._message) != Status.PENDING)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message has moved; raise if its other end is gone or late."""
        seconds = timeout.total_seconds() if timeout is not None else 0
        return self._finish(seconds if seconds > 0 else self._group.timeout_s)

    def _finish(self, timeout_s: float) -> bool:
        if self._message is None:
            if self._error is not None:
                raise self._error
            return True
        core, handle = self._group.core, self._group.handle
        status = core.frd_message_wait(handle, self._message, timeout_s, flags_here())
        message, self._message = self._message, None
        self._source = core.frd_message_source(message)
        core.frd_message_release(handle, message)
        try:
            self._group.check(status)
        except BaseException as error:
            self._error = error
            raise
        if not self._sends and self._buffer is not self._tensors[0]:
            with torch.no_grad():
                self._tensors[0].copy_(self._buffer)
        return True

    def _source_rank(self) -> int:
        return self._source

    def source_rank(self) -> int:
        """The rank in the group that a receive came from."""
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensor; a thread waits for the message."""
        if self._future is None:
            self._future = LaneFuture()
            _callbacks.submit(self._complete_future, self._future)
        return self._future

    def _complete_future(self, future: LaneFuture) -> None:
        try:
            self.wait()
        except BaseException as error:  # goes to whoever holds the future
            future.complete(self._tensors, error)
        else:
            future.complete(self._tensors, None)
