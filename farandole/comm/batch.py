"""Messages that are posted together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from farandole.comm.arrays import Array, read, written
from farandole.comm.fallback import TorchCore

if TYPE_CHECKING:
    from farandole.comm.communicator import Communicator


class Batch:
    """Messages that are posted together; see `Communicator.batch`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._messages: list[tuple[bool, Tensor, int, int]] = []

    def send(self, tensor: Array, to: int, tag: int = 0) -> None:
        """Send `tensor` to rank `to`."""
        self._messages.append((True, read(tensor), to, tag))

    def recv(self, tensor: Array, source: int, tag: int = 0) -> None:
        """Receive into `tensor` from rank `source`."""
        self._messages.append((False, written(tensor), source, tag))

    def start(self) -> list[dist.Work]:
        """Post the messages and return their works."""
        messages, self._messages = self._messages, []
        core = self._comm.dispatcher.core
        if isinstance(core, TorchCore) and messages:  # NCCL needs the messages of a batch in one group
            operations = [
                dist.P2POp(
                    dist.isend if sends else dist.irecv, tensor, group=core.group, group_peer=peer, tag=tag
                )
                for sends, tensor, peer, tag in messages
            ]
            return list(dist.batch_isend_irecv(operations))
        return [self._comm.post(tensor, peer, tag, sends=sends) for sends, tensor, peer, tag in messages]

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for work in self.start():
                work.wait()
