"""Transports, which exchange non-blocking messages between the ranks that run a collective algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.dtypes import TYPES
from farandole.comm.errors import RankLate
from farandole.comm.host_group import HostGroup
from farandole.comm.notices import STALL_WARNING_S, warn
from farandole.comm.work import flags_here
from farandole.native import TRY, Status


class Pending(Protocol):
    """A pending send or receive.  Do not modify the tensor until the message is complete."""

    def test(self) -> bool:
        """Return whether the message is complete."""

    def wait(self, timeout_s: float) -> None:
        """Block until the message is complete.

        Raises:
            RankLate: if the message is not complete after `timeout_s` seconds.
            CommunicationError: if the message failed.
        """


class Transport(Protocol):
    """Exchanges point-to-point messages between `size` ranks.  Messages from one rank to another arrive in order."""

    rank: int
    size: int

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Pending:
        """Start sending a contiguous tensor to rank `peer`."""

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Pending:
        """Start receiving from rank `peer` into a contiguous tensor of the same size as the message."""


class WireMessage:
    """A send or receive through the C core, as part of a collective."""

    def __init__(self, host: HostGroup, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> None:
        self._host, self._tensor, self._peer = host, tensor, peer
        post = host.post_send if sends else host.post_recv
        size = tensor.numel() * tensor.element_size()
        self._message = post(tensor.data_ptr(), size, TYPES[tensor.dtype], peer, tag)

    def test(self) -> bool:
        """Return whether the message is complete."""
        if self._message is None:
            return True
        return self._finish(self._host.test_message(self._message))

    def wait(self, timeout_s: float) -> None:
        """Block until the message is complete."""
        if self._message is not None:
            self._finish(self._wait(timeout_s, STALL_WARNING_S))

    def _wait(self, timeout_s: float, warn_after_s: float) -> int:
        assert self._message is not None
        wait, flags = self._host.wait_message, flags_here()
        begun, status = time.monotonic(), int(Status.PENDING)
        while status == Status.PENDING:
            waited = time.monotonic() - begun
            if timeout_s <= warn_after_s:
                return wait(self._message, max(0.0, timeout_s - waited), flags)
            status = wait(self._message, max(0.0, warn_after_s - waited), flags | TRY)
            if status == Status.PENDING:
                warn(self._host.late_peer(self._peer, warn_after_s, timeout_s))
                warn_after_s *= 2
        return status

    def _finish(self, outcome: int) -> bool:
        if outcome == Status.PENDING:
            return False
        self._message = None  # the C core has released the message
        self._host.source_of(outcome)
        return True

    def release(self) -> None:
        """Cancel the message if it is pending.  After a cancellation, the group is unusable."""
        message, self._message = self._message, None
        if message is not None:
            self._host.cancel_message(message)


class WireTransport:
    """Sends messages between the `ranks` of a group through the C core, over TCP or shared memory."""

    def __init__(self, host: HostGroup, ranks: Sequence[int], channel: int) -> None:
        self.rank = list(ranks).index(host.group_rank)
        self.size = len(ranks)
        self._host = host
        self._ranks = list(ranks)
        self._channel = channel  # separates this transport's messages from those of other transports
        self._open: list[WireMessage] = []

    def connect(self) -> None:
        """Connect to all ranks immediately instead of at the first message."""
        for rank in self._ranks:
            self._host.core.frd_connect(self._host.handle, rank)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> WireMessage:
        """Start sending `tensor` to rank `peer`."""
        return self._post(tensor, peer, tag, sends=True)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> WireMessage:
        """Start receiving into `tensor` from rank `peer`."""
        return self._post(tensor, peer, tag, sends=False)

    def _post(self, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> WireMessage:
        tag = -1 - (tag << 8 | self._channel)  # tags below 0 are reserved for collectives
        message = WireMessage(self._host, tensor, self._ranks[peer], tag, sends=sends)
        self._open.append(message)
        return message

    def release(self) -> None:
        """Cancel all pending messages.

        Call this method after every collective.  Only a failed collective leaves messages pending.
        """
        messages, self._open = self._open, []
        for message in messages:
            message.release()

    def group_rank(self, peer: int) -> int:
        """Convert rank `peer` in this transport to a rank in the group."""
        return self._ranks[peer]


class Tagged:
    """Wraps another transport, and adds a constant to the tag of each message."""

    def __init__(self, transport: Transport, tag: int) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport = transport
        self._tag = tag

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Pending:
        """Start sending `tensor` to rank `peer`."""
        return self._transport.send(tensor, peer, self._tag + tag)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Pending:
        """Start receiving into `tensor` from rank `peer`."""
        return self._transport.recv(tensor, peer, self._tag + tag)


class TorchMessage:
    """A message sent or received through a torch process group.  `arrived` is called after the message is complete."""

    def __init__(self, work: dist.Work, arrived: Callable[[], object] | None = None) -> None:
        self._work = work
        self._arrived = arrived

    def test(self) -> bool:
        """Return whether the message is complete."""
        if not self._work.is_completed():
            return False
        self._complete()
        return True

    def wait(self, timeout_s: float) -> None:
        """Block until the message is complete.

        Raises:
            RankLate: if the message is not complete after `timeout_s` seconds, or its connection has failed.  After a
                timeout, Gloo closes its connections.
        """
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise RankLate(
                f"a message through torch's transport did not complete within {timeout_s:g} s, or its connection "
                f"failed: {error}; check that the other ranks are running"
            ) from error
        self._complete()

    def _complete(self) -> None:
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            arrived()


class TorchTransport:
    """Sends messages through a torch process group that supports CPU tensors, such as Gloo."""

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._group = group

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> TorchMessage:
        """Start sending `tensor` to rank `peer`."""
        return TorchMessage(self._group.send([tensor], peer, tag))

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> TorchMessage:
        """Start receiving into `tensor` from rank `peer`."""
        return TorchMessage(self._group.recv([tensor], peer, tag))


class DeviceTransport:
    """Sends and receives CPU tensors through process groups that support only device tensors, such as NCCL.

    NCCL processes the messages between two ranks in call order, and a large send blocks until the peer receives
    it.  Two ranks that both send before they receive would deadlock, so each direction uses a separate group.

    Args:
        upward: The group for messages to higher ranks.
        downward: A second group with the same ranks, for messages to lower ranks.
        device: The device to which the tensors are copied for communication.
    """

    def __init__(self, upward: Any, downward: Any, device: torch.device) -> None:
        self.rank: int = upward.rank()
        self.size: int = upward.size()
        self._upward, self._downward = upward, downward
        self._device = device

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> TorchMessage:
        """Start sending `tensor` to rank `peer`."""
        group = self._upward if peer > self.rank else self._downward
        return TorchMessage(group.send([tensor.to(self._device)], peer, tag))

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> TorchMessage:
        """Start receiving into `tensor` from rank `peer`."""
        staged = torch.empty_like(tensor, device=self._device)
        group = self._upward if peer < self.rank else self._downward
        return TorchMessage(group.recv([staged], peer, tag), lambda: tensor.copy_(staged))
