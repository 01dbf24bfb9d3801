"""Send and receive tensors between stages during one step.

Each forward pass sends its output to the rank of the next stage, and each backward pass sends the gradients of its
inputs to the rank of the previous stage.  Shapes are determined at run time: each output is preceded by a header
with dtypes and shapes.  A tensor that occurs twice in an output is sent once, and so is its gradient.  Gradients have
the shapes of the output, which the receiver of the gradients knows.  A byte sent with each gradient states whether the
gradient is present, absent or invalid.

A rank that has failed sends an empty tuple as each further output, and invalid gradients (`stage_error`).

The order of messages follows from the schedule of all ranks.  A rank sends a result directly after the action that
computed it, and posts the receives from a peer in the order of the peer's sends.  This order of
messages cannot cause a deadlock:

- Sends never block, and a rank waits only for receives.
- Assume that some ranks wait forever.  Each of them waits, before one of its actions, for a message from a peer, or for
  an earlier message from the same peer.  The peer has not sent the message, so the peer waits as well, before the
  action that computes the message or before an earlier action.  Therefore each waiting rank waits for an action that
  precedes its own action in the order of the simulator (`simulate`).  This order is finite, so one of the awaited
  actions is the first, and its rank does not wait.  This contradicts the assumption.

Because receives are posted as soon as the header has arrived, data arrives while the rank computes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.parallel.axes import AxisCommunicator
from farandole.parallel.pipeline.balance import tensors_of
from farandole.parallel.pipeline.schedule import Action, Backward, BackwardInput, Forward, Schedule

HEADER_LENGTH = 256
"""The length of a header in int64 numbers."""

TYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


@dataclass(frozen=True)
class TensorShape:
    """The dtype and shape of a tensor, and whether the tensor requires a gradient."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorShape:
        """Return the dtype and shape of `tensor`."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of this dtype and shape."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


_INVALID, _PRESENT, _ABSENT = range(3)
"""The states of a gradient: the sender has failed; the gradient exists; the stage has computed no gradient."""

Message = tuple[str, int, int]
"""The key of a message: "F" (an output) or "I" (a gradient), the stage that receives it, and the micro-batch."""


@dataclass(frozen=True)
class OutputShape:
    """The shape of a stage's output, which is a tensor, or a tuple of tensors and None."""

    tensors: list[TensorShape]
    """The shapes of the distinct tensors in the output."""
    parts: list[int]
    """For each part of the output, the index of its tensor in `tensors`, or -1 for None."""
    single: bool = False
    """Whether the output is a tensor instead of a tuple."""

    @classmethod
    def of(cls, output: Any) -> OutputShape:
        """Return the shape of `output`."""
        parts = (output,) if isinstance(output, Tensor) else output
        tensors = tensors_of(output)
        index = {id(tensor): number for number, tensor in enumerate(tensors)}
        return cls(
            list(map(TensorShape.of, tensors)),
            [index.get(id(part), -1) for part in parts],
            single=isinstance(output, Tensor),
        )

    @property
    def gradients(self) -> list[TensorShape]:
        """The shapes of the gradients of the output."""
        return [shape for shape in self.tensors if shape.requires_grad]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return an output of this shape that contains `tensors`."""
        parts = tuple(None if number < 0 else tensors[number] for number in self.parts)
        return parts[0] if self.single else parts

    def numbers(self) -> list[int]:
        """Return the shape encoded as at most `HEADER_LENGTH` integers.

        Raises:
            TypeError: if more numbers are needed, or a dtype is not supported.
        """
        numbers = [int(self.single), len(self.parts), *self.parts, len(self.tensors)]
        for shape in self.tensors:
            if shape.dtype not in TYPES:
                raise TypeError(
                    f"a stage's output has dtype {shape.dtype}; expected one of {', '.join(map(str, TYPES))}"
                )
            numbers += [TYPES.index(shape.dtype), int(shape.requires_grad), len(shape.shape), *shape.shape]
        if len(numbers) > HEADER_LENGTH:
            raise TypeError(
                f"a stage's output has {len(self.parts)} tensors, whose shapes need {len(numbers)} numbers, more than "
                f"{HEADER_LENGTH}; return fewer tensors from a block"
            )
        return numbers

    def encode(self) -> Tensor:
        """Return the shape as a header of `HEADER_LENGTH` numbers."""
        numbers = self.numbers()
        header = torch.zeros(HEADER_LENGTH, dtype=torch.int64)
        header[: len(numbers)] = torch.tensor(numbers)
        return header

    @classmethod
    def decode(cls, header: Tensor) -> OutputShape:
        """Return the shape encoded in `header` by `encode`."""
        numbers = iter(header.tolist())
        single = bool(next(numbers))
        parts = [next(numbers) for _ in range(next(numbers))]
        shapes = []
        for _ in range(next(numbers)):
            dtype, requires_grad, dims = TYPES[next(numbers)], bool(next(numbers)), next(numbers)
            shapes.append(TensorShape(dtype, tuple(next(numbers) for _ in range(dims)), requires_grad))
        return cls(shapes, parts, single)


@dataclass
class _Receive:
    """A posted receive, and the tensors that it fills."""

    works: list[dist.Work]
    tensors: list[Tensor]
    shape: OutputShape | None = None
    """The shape of an output; None for gradients."""
    states: Tensor | None = None
    """The states of gradients, one byte each; None for an output, and if there are no gradients."""


class Transfers:
    """Sends and receives this rank's messages in one step.

    Args:
        comm: the communicator of the pipeline's ranks.
        places: the rank in `comm` of each rank of the schedule.
        rank: the index of this rank in the schedule.
        device: the device on which received tensors are allocated.
    """

    def __init__(
        self,
        comm: AxisCommunicator,
        places: Sequence[int],
        schedule: Schedule,
        rank: int,
        device: torch.device,
    ) -> None:
        self._comm, self._places, self._schedule, self._device = comm, places, schedule, device
        self.waited_s = 0.0
        """The total time in seconds that `receive` has waited."""
        self.failed = False
        """Whether a message from a failed rank has arrived."""
        self._sends: list[tuple[dist.Work, Tensor]] = []
        self._gradients: dict[Message, list[TensorShape]] = {}
        self._posted: dict[Message, _Receive] = {}
        self._headers: dict[int, tuple[dist.Work, Tensor]] = {}
        self._queues = {
            peer: deque(messages)
            for peer in range(schedule.ranks)
            if peer != rank and (messages := messages_between(schedule, peer, rank))
        }

    def send_output(self, stage: int, m: int, output: Any) -> None:
        """Send the output of a forward pass to the next stage."""
        shape = OutputShape.of(output)
        message = ("F", stage + 1, m)
        peer = self._schedule.rank_of(stage + 1, m)
        self._send(shape.encode().to(self._device), peer, self._tag(message, header=True))
        for tensor in tensors_of(output):
            self._send(tensor.detach().contiguous(), peer, self._tag(message))
        self._gradients["I", stage, m] = shape.gradients

    def send_gradients(
        self,
        stage: int,
        m: int,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        *,
        valid: bool = True,
    ) -> None:
        """Send the gradients of a stage's inputs to the previous stage.

        Args:
            gradients: the gradient of each input, or None.
        """
        message, peer = ("I", stage - 1, m), self._schedule.rank_of(stage - 1, m)
        for own, gradient in zip(inputs, gradients, strict=True):
            sent = torch.zeros_like(own) if gradient is None else gradient.contiguous()
            self._send(sent, peer, self._tag(message))
        if inputs:
            states = [_INVALID if not valid else _ABSENT if each is None else _PRESENT for each in gradients]
            sent = torch.tensor(states, dtype=torch.uint8, device=self._device)
            self._send(sent, peer, self._tag(message, header=True))

    def receive(self, code: str, stage: int, m: int) -> Any:
        """Return the input of a pass: the previous stage's output ("F") or the gradients of this stage's output ("I").

        Received outputs are leaves that require gradients if the sent tensors did.  A missing gradient is None.
        `failed` is set if the sender has failed.
        """
        started = time.perf_counter()
        message = (code, stage, m)
        peer = self._schedule.rank_of(stage + (1 if code == "I" else -1), m)
        while message not in self._posted:
            self._post(peer)
        received = self._posted.pop(message)
        for work in received.works:
            work.wait()
        self.waited_s += time.perf_counter() - started
        output = received.shape
        if output is None:
            states = [] if received.states is None else received.states.tolist()
            self.failed |= _INVALID in states
            pairs = zip(received.tensors, states, strict=True)
            return [None if state == _ABSENT else tensor for tensor, state in pairs]
        self.failed |= not output.parts
        for tensor, shape in zip(received.tensors, output.tensors, strict=True):
            tensor.requires_grad_(shape.requires_grad)
        return output.filled(received.tensors)

    def poll(self) -> None:
        """Post all receives whose shapes are known, and release tensors that have been sent."""
        for peer, queue in self._queues.items():
            while queue and self._is_known(peer, queue[0]):
                self._post(peer)
        self._sends = [(work, tensor) for work, tensor in self._sends if not work.is_completed()]

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self._sends:
            work.wait()
        self._sends = []

    def _is_known(self, peer: int, message: Message) -> bool:
        """Return whether the shapes of a peer's next message are known."""
        if message[0] == "I":
            return message in self._gradients
        return self._header(peer, message)[0].is_completed()

    def _header(self, peer: int, message: Message) -> tuple[dist.Work, Tensor]:
        if peer not in self._headers:
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self._device)
            self._headers[peer] = (
                self._comm.irecv(header, self._places[peer], self._tag(message, header=True)),
                header,
            )
        return self._headers[peer]

    def _post(self, peer: int) -> None:
        """Post the receive for a peer's next message."""
        message = self._queues[peer].popleft()
        output, states, works = None, None, []
        if message[0] == "I":
            shapes = self._gradients.pop(message)
            if shapes:
                states = torch.empty(len(shapes), dtype=torch.uint8, device=self._device)
                works = [self._comm.irecv(states, self._places[peer], self._tag(message, header=True))]
        else:
            work, header = self._header(peer, message)
            work.wait()
            del self._headers[peer]
            output = OutputShape.decode(header.cpu())
            shapes = output.tensors
        tensors = [shape.empty(self._device) for shape in shapes]
        tag = self._tag(message)
        works += [self._comm.irecv(tensor, self._places[peer], tag) for tensor in tensors]
        self._posted[message] = _Receive(works, tensors, output, states)

    def _send(self, tensor: Tensor, peer: int, tag: int) -> None:
        self._sends.append((self._comm.isend(tensor, self._places[peer], tag), tensor))

    def _tag(self, message: Message, *, header: bool = False) -> int:
        code, stage, m = message
        return 4 * (stage * self._schedule.micro_batches + m) + 2 * (code == "I") + header


def messages_between(schedule: Schedule, peer: int, rank: int) -> list[Message]:
    """Return the messages from a peer to a rank, in the order in which the peer sends them."""

    def of(action: Action) -> Message | None:
        stage, m = action.stage, action.micro_batch
        if isinstance(action, Forward) and stage + 1 < schedule.stages:
            return ("F", stage + 1, m) if schedule.rank_of(stage + 1, m) == rank else None
        if isinstance(action, Backward | BackwardInput) and stage:
            return ("I", stage - 1, m) if schedule.rank_of(stage - 1, m) == rank else None
        return None

    return [message for action in schedule.actions[peer] if (message := of(action)) is not None]
