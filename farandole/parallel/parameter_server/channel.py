"""The connection between a worker and a server: small headers, each optionally followed by buffers.

Each worker-server pair has its own process group, because a process group fails completely when one of its ranks dies.
With separate groups, only the dead rank's partners are affected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.parallel.parameter_server.layout import Buffers

TEXT_BYTES = 1024
PATIENCE_S = 0.5


class Kind(IntEnum):
    """The kind of a message."""

    # Worker to server:
    HELLO = 1  # `number`: a fingerprint of the session
    PULL = 2  # requests the parameters; the server answers as soon as the mode allows
    PUSH = 3  # which pieces have a gradient, and the gradients; the `version` of their parameters; `weight`
    PARAMETERS = 4  # the parameters: a worker's answer to WANTED, or a server's answer to PULL or FINISH
    FINISH = 5  # no more gradients; requests the parameters after all workers have finished
    ALIVE = 6  # the answer to WAIT
    LEAVE = 7  # all parameters have arrived
    LOST = 8  # another server is lost; a text names it
    # Server to worker:
    WELCOME = 9
    REFUSED = 10  # a text with the reason
    WANTED = 11  # requests the first parameters from the worker
    WAIT = 12  # the worker must wait


@dataclass(frozen=True)
class Header:
    """The header of every message."""

    kind: Kind
    number: int = 0
    version: int = 0
    weight: float = 1.0


@dataclass(frozen=True)
class Plan:
    """The options of a session, as text (`summary`) and as a 48-bit hash (`fingerprint`).

    All ranks must have the same options.
    """

    summary: str
    fingerprint: int


class Channel:
    """One end of a connection.

    Methods that send or receive raise RuntimeError if the other end has died or does not respond in time.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.peer = peer
        """The rank at the other end, in the communicator of the parameter server."""
        self._comm = Communicator(group)
        self._other = 1 - self._comm.rank
        self._posted: list[tuple[dist.Work, Tensor]] = []

    def send(self, header: Header, tensors: Iterable[Tensor] = ()) -> None:
        """Send a header and tensors; return when the memory of the tensors can be reused."""
        for tensor in (_pack(header), *tensors):
            self._comm.send(tensor, self._other)

    def post(self, header: Header, tensors: Iterable[Tensor] = ()) -> None:
        """Start sending a header and tensors, and return immediately.

        The tensors must not change until the other end has received them, for example until the next request from the
        other end arrives.
        """
        self._posted = [(work, tensor) for work, tensor in self._posted if not work.is_completed()]
        for tensor in (_pack(header), *tensors):
            self._posted.append((self._comm.isend(tensor, self._other), tensor))

    def receive(self) -> Header:
        """Return the next header, or raise RuntimeError after the group's timeout."""
        fields = torch.empty(4, dtype=torch.float64)
        self._comm.recv(fields, self._other)
        kind, number, version, weight = fields.tolist()
        return Header(Kind(int(kind)), int(number), int(version), weight)

    def receive_into(self, tensors: Iterable[Tensor]) -> None:
        """Receive the data that follows a header into `tensors`."""
        for tensor in tensors:
            self._comm.recv(tensor, self._other)

    def send_text(self, kind: Kind, text: str) -> None:
        """Send a header, followed by text."""
        data = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)
        self.send(Header(kind), [torch.frombuffer(bytearray(data), dtype=torch.uint8)])

    def receive_text(self) -> str:
        """Return the text that follows a header."""
        data = torch.empty(TEXT_BYTES, dtype=torch.uint8)
        self.receive_into([data])
        return bytes(data.tolist()).decode(errors="replace").strip()

    def abandon(self, note: str) -> None:
        """After a failure, send `note` to the other end and close the connection.

        Calls in other threads that use the connection are interrupted.
        """
        leave = getattr(self._comm.group, "abandon", None)
        if leave is not None:
            leave(note, PATIENCE_S)

    def close(self) -> None:
        """Discard the posted messages and destroy the process group."""
        self._posted.clear()
        dist.destroy_process_group(self._comm.group)


def _pack(header: Header) -> Tensor:
    return torch.tensor([header.kind, header.number, header.version, header.weight], dtype=torch.float64)


def in_order(buffers: Buffers) -> list[Tensor]:
    """Return the buffers in sending order, which is the same on both sides."""
    return list(buffers.values())
