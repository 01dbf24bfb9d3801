"""Batches of point-to-point messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from farandole.comm.arrays import Array, read, written
from farandole.comm.fallback import TorchCore
from farandole.comm.operations import existing_rank

if TYPE_CHECKING:
    from farandole.comm.communicator import Communicator


class Batch:
    """Collects sends and receives that are posted together; see `Communicator.batch`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._messages: list[tuple[bool, Tensor, int, int]] = []

    def send(self, tensor: Array, to: int, tag: int = 0) -> None:
        """Add a send of `tensor` to rank `to`."""
        self._messages.append((True, read(tensor), to, tag))

    def recv(self, tensor: Array, source: int, tag: int = 0) -> None:
        """Add a receive from rank `source` into `tensor`."""
        self._messages.append((False, written(tensor), source, tag))

    def start(self) -> list[dist.Work]:
        """Post the added messages, and return their work objects.

        There is one work object per message, or one per device with NCCL.
        """
        messages, self._messages = self._messages, []
        if not any(tensor.is_cuda for _, tensor, _, _ in messages):
            return self._post(messages)
        devices = dict.fromkeys(tensor.device for _, tensor, _, _ in messages)
        return [
            work
            for device in devices
            for work in self._post([message for message in messages if message[1].device == device])
        ]

    def _post(self, messages: list[tuple[bool, Tensor, int, int]]) -> list[dist.Work]:
        """Post `messages`, whose tensors are all on the same device."""
        dispatcher = self._comm.dispatcher
        core = dispatcher.core_for([tensor for _, tensor, _, _ in messages])
        if not isinstance(core, TorchCore) or not messages:
            return [self._comm.post(tensor, peer, tag, sends=sends) for sends, tensor, peer, tag in messages]
        for sends, _, peer, _ in messages:
            name, what = ("send", "the destination") if sends else ("recv", "the source")
            existing_rank(name, what, peer, self._comm.size)
        return core.post_batch(messages)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for work in self.start():
                work.wait()
