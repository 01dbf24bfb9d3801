"""Compute each step of the generation engine on several ranks, which divide the model by tensor parallelism.

Rank 0, the *driver*, schedules, samples and keeps the bookkeeping of the store.  Before each step, the driver broadcasts
the changes of the store's memory since the last step, and the spans of tokens.  The other ranks, the *workers*, apply
the changes to their own memory, which stores the keys and values of their heads, and run the same forward pass.  The
logits are divided by words, and gathered on the driver.

While there is no work, the driver calls `beat` every `HEARTBEAT_S` seconds.  A waiting rank sleeps in the kernel.
"""

from __future__ import annotations

import contextlib
import signal
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.comm.errors import CommunicationError
from farandole.layout import chunk
from farandole.models.sequence import SequenceInfo, Transformer
from farandole.parallel.tensor import Words, sharded_logits
from farandole.serve.runner import Runner, Span
from farandole.serve.store import LayerShape, Memory

HEARTBEAT_S = 1.0
"""The seconds between two checks of idle workers."""
HEAD = 4096
"""The number of integers that each step broadcasts; a longer message needs a second broadcast."""

_STOP, _BEAT, _RUN = range(3)
_RESIZE, _MOVE = range(2)
_CHANGE = 5  # integers per change: the kind and up to four arguments


class RanksFailed(RuntimeError):
    """Raised on the driver if the ranks can no longer compute together; the message names the failed rank if known."""


class ShardedRunner(Runner):
    """Computes logits with the other ranks of a communicator.

    Args:
        model: a decoder that `shards.shard_model` has divided over the ranks of `comm`.
        comm: the communicator.
        use_core: whether to use the C core, by default if available.
    """

    def __init__(self, model: Transformer, comm: Communicator, use_core: bool | None = None) -> None:
        self.comm = comm
        words: Any = model[-1].vocabulary
        assert isinstance(words, Words)
        super().__init__(model, use_core)
        self.vocabulary = words.count
        chunks = [chunk(words.count, comm.size, rank) for rank in range(comm.size)]
        self._widths = [end - start for start, end in chunks]
        self._sharded = sharded_logits(model)
        self._sharded.__enter__()  # as long as the runner exists
        self._channel = _Channel(comm)

    def _logits(self, hidden: Tensor, info: SequenceInfo) -> Tensor:
        """Return the logits (tokens, vocabulary) on the driver, and the logits of this rank's words on workers."""
        own = super()._logits(hidden, info).contiguous()
        counts = [len(own) * width for width in self._widths]
        if self.comm.rank:
            self.comm.gather(own.view(-1), None, counts=counts)
            return own
        every = [own.new_empty(count) for count in counts]
        self.comm.gather(own.view(-1), every, counts=counts)
        return torch.cat([part.view(len(own), -1) for part in every], -1)


class Driver(ShardedRunner):
    """The runner of rank 0, for `GenerationEngine`."""

    heartbeat_s = HEARTBEAT_S

    def memory(self) -> Memory:
        """Return new memory, whose changes the workers repeat.  Call once."""
        self._changes = array("i")
        return _RecordedMemory(self.shapes, self._changes)

    def run(self, memory: Memory, spans: Sequence[Span]) -> Tensor:
        """Run a step on all ranks; see `Runner.run`.

        Raises:
            RanksFailed: if the step fails on any rank.
        """
        with _failing():
            self._send(_RUN, spans)
            return super().run(memory, spans)

    def beat(self) -> None:
        """Check that all workers are alive.

        Raises:
            RanksFailed: if a worker is not.
        """
        with _failing():
            self._send(_BEAT)
            self.comm.barrier()

    def close(self) -> None:
        """End the workers."""
        with contextlib.suppress(CommunicationError):
            self._send(_STOP)
            self.comm.barrier()

    def _send(self, kind: int, spans: Sequence[Span] = ()) -> None:
        message = array("i", (kind, len(self._changes) // _CHANGE, len(spans)))
        message += self._changes
        for span in spans:
            message.extend((span.start, span.logits, len(span.tokens), len(span.blocks)))
            message.extend(span.tokens)
            message.extend(span.blocks)
        del self._changes[:]
        self._channel.send(message)


class Worker(ShardedRunner):
    """The runner of the other ranks."""

    @torch.inference_mode()
    def follow(self) -> None:
        """Repeat the driver's steps until the driver closes.  Signals that stop the job are left to the driver.

        Raises:
            CommunicationError: if a rank fails.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        memory = self.memory()
        while True:
            message = self._channel.receive()
            kind, changes, count = message[:3]
            at = 3 + changes * _CHANGE
            for change in range(3, at, _CHANGE):
                what, *values = message[change : change + _CHANGE]
                if what == _RESIZE:
                    memory.resize(*values)
                else:
                    memory.move(*values[:3])
            if kind == _RUN:
                self.run(memory, list(_spans(message, at, count)))
            else:
                with contextlib.suppress(*(CommunicationError,) if kind == _STOP else ()):
                    self.comm.barrier()
            if kind == _STOP:
                return


class _RecordedMemory(Memory):
    """Memory that records its changes for the workers."""

    def __init__(self, shapes: Sequence[LayerShape], changes: array[int]) -> None:
        self._changes = changes
        super().__init__(shapes)

    def resize(self, blocks: int, length: int, kept: int, stored: int) -> None:
        """Change the size; see `Memory.resize`."""
        self._changes.extend((_RESIZE, blocks, length, kept, stored))
        super().resize(blocks, length, kept, stored)

    def move(self, source: int, target: int, stored: int) -> None:
        """Copy a block; see `Memory.move`."""
        self._changes.extend((_MOVE, source, target, stored, 0))
        super().move(source, target, stored)


class _Channel:
    """Broadcasts lists of 32-bit integers from rank 0, in a buffer that is used again for each message."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._head = comm.empty(HEAD, dtype=torch.int32)
        self._broadcast = comm.broadcast_init(self._head)

    def send(self, message: array[int]) -> None:
        """Send a message."""
        values = torch.frombuffer(message, dtype=torch.int32)
        first = values[: HEAD - 1]
        self._head[0] = len(values)
        self._head[1 : 1 + len(first)] = first
        self._broadcast()
        if len(values) > len(first):
            self._comm.broadcast(values[len(first) :].clone())

    def receive(self) -> list[int]:
        """Receive a message."""
        self._broadcast()
        length = int(self._head[0])
        message: list[int] = self._head[1 : 1 + length].tolist()
        if length > len(message):
            rest = torch.empty(length - len(message), dtype=torch.int32)
            self._comm.broadcast(rest)
            message += rest.tolist()
        return message


def _spans(message: Sequence[int], at: int, count: int) -> Iterator[Span]:
    for _ in range(count):
        start, logits, tokens, blocks = message[at : at + 4]
        at += 4
        own, at = message[at : at + tokens], at + tokens
        yield Span(own, start, message[at : at + blocks], logits)
        at += blocks


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Turn every error into `RanksFailed`, because ranks that stop within a step are at different calls."""
    try:
        yield
    except Exception as error:
        raise RanksFailed(str(error)) from error
