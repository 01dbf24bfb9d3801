"""Compute each step of the generation engine on several tensor-parallel ranks.

Rank 0, the *driver*, schedules, samples and manages the KV cache.  Before each step, the driver broadcasts the changes
to the KV cache since the last step (resized or moved blocks), and the spans of tokens.  The other ranks, the *workers*,
apply the changes to the keys and values of their own heads, and run the same forward pass.  The logits are sharded
along the vocabulary, and gathered on the driver.

With several replicas, all drivers except the first are `RemoteDriver`s.  A `RemoteDriver` stores no part of the model:
only its workers compute.

While there is no work, the driver calls `beat` every `HEARTBEAT_S` seconds.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.comm.errors import CommunicationError
from farandole.layout import chunk
from farandole.models.sequence import Transformer
from farandole.parallel.tensor import sharded_logits
from farandole.parallel.tensor.vocabulary import ParallelVocabulary
from farandole.serve.ranks.errors import RanksFailed
from farandole.serve.runner import Runner, Span
from farandole.serve.store import LayerShape, Memory
from farandole.serve.threads import core_threads

HEARTBEAT_S = 1.0
"""The seconds between two checks of idle workers."""
HEAD = 4096
"""The number of integers in the first broadcast of each message; a longer message needs a second broadcast."""

_STOP, _PAUSE, _BEAT, _RUN = range(4)
_RESIZE, _MOVE = range(2)
_CHANGE = 5  # integers per change: the kind and up to four arguments


class ShardedRunner(Runner):
    """Computes logits with the other ranks of a communicator.

    Args:
        model: a decoder that `shards.shard_model` has sharded across the computing ranks of `comm`.
        comm: the communicator, whose rank 0 is the driver.
        remote: whether the driver is a `RemoteDriver`, which does not compute.
        options: other arguments of `Runner`.  `adapters` are this rank's shards of the LoRA adapters, with the same
            names in the same order on all ranks.
    """

    def __init__(
        self,
        model: Transformer,
        comm: Communicator,
        *,
        remote: bool = False,
        **options: Any,
    ) -> None:
        self.comm, self.ranks = comm, comm.size
        vocabulary: Any = model[-1].vocabulary
        super().__init__(model, **options)
        if isinstance(vocabulary, ParallelVocabulary):
            self.vocabulary = vocabulary.count
        self._widths = _widths(self.vocabulary, comm.size, remote=remote)
        self._sharded = sharded_logits(model)
        self._sharded.__enter__()  # stays active as long as the runner exists


class Driver(Runner):
    """The runner of rank 0, which sends each step to the workers."""

    heartbeat_s = HEARTBEAT_S
    _steps: _Steps

    def beat(self) -> None:
        """Check that all workers are alive.

        Raises:
            RanksFailed: if a worker is not alive.
        """
        self._steps.beat()

    def pause(self) -> None:
        """Pause all workers: `Worker.follow` returns True.

        Raises:
            RanksFailed: if a worker is not alive.
        """
        self._steps.pause()

    def close(self) -> None:
        """Stop the workers."""
        self._steps.close()


class LocalDriver(ShardedRunner, Driver):
    """A driver that also computes a shard of the model; see `ShardedRunner` for the arguments."""

    def __init__(self, model: Transformer, comm: Communicator, **options: Any) -> None:
        super().__init__(model, comm, **options)
        self._steps = _Steps(comm, list(self.adapters))

    def memory(self) -> Memory:
        """Return a new `Memory`.  Its changes are also applied on the workers.  Call this method only once."""
        return _RecordedMemory(self.shapes, self._steps.changes)

    def run(self, memory: Memory, spans: Sequence[Span]) -> Tensor:
        """Run a step on all ranks; see `Runner.run`.

        Raises:
            RanksFailed: if the step fails on any rank.
        """
        with self._steps.together():
            self._steps.send(_RUN, spans)
            return super().run(memory, spans)

    def _gathered(self, logits: Tensor) -> Tensor:
        """Return the gathered logits of all ranks, of shape (tokens, vocabulary)."""
        return _gather(self.comm, logits, self._widths)


class RemoteDriver(Driver):
    """A driver that stores no part of the model.

    The constructor is a collective call: each worker must construct a `Worker` with `remote=True` at the same time.

    Args:
        comm: the communicator of this process (rank 0) and the workers.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.vocabulary, self.shapes, self.bytes_per_position, names = comm.broadcast_object(None, 1)
        self.adapters = {name: {} for name in names}
        self._widths = _widths(self.vocabulary, comm.size, remote=True)
        self._steps = _Steps(comm, names)

    def memory(self) -> Memory:
        """Return a `Memory` without tensors.  Its changes are applied on the workers.  Call this method only once."""
        return _RecordedMemory([], self._steps.changes)

    def run(self, memory: Memory, spans: Sequence[Span]) -> Tensor:
        """Run a step on the workers; see `Runner.run`.

        Raises:
            RanksFailed: if the step fails on any rank.
        """
        with self._steps.together():
            self._steps.send(_RUN, spans)
            rows = sum(span.logits for span in spans)
            if not rows:
                return torch.empty(0, self.vocabulary)
            return _gather(self.comm, torch.empty(rows, 0), self._widths)


class Worker(ShardedRunner):
    """The runner of a rank other than the driver; see `ShardedRunner` for the arguments."""

    def __init__(
        self, model: Transformer, comm: Communicator, *, remote: bool = False, **options: Any
    ) -> None:
        super().__init__(model, comm, remote=remote, **options)
        self._names = list(self.adapters)
        if remote:
            comm.broadcast_object((self.vocabulary, self.shapes, self.bytes_per_position, self._names), 1)
        self._channel = _Channel(comm)
        self._memory = self.memory()

    @torch.inference_mode()
    @core_threads()
    def follow(self) -> bool:
        """Run the driver's steps until the driver pauses or closes.

        Returns:
            True if the driver has paused, False if the driver has closed.

        Raises:
            CommunicationError: if a rank fails.
        """
        while True:
            message = self._channel.receive()
            kind, changes, count = message[:3]
            at = 3 + changes * _CHANGE
            for change in range(3, at, _CHANGE):
                what, *values = message[change : change + _CHANGE]
                if what == _RESIZE:
                    self._memory.resize(*values)
                else:
                    self._memory.move(*values[:3])
            if kind == _RUN:
                self.run(self._memory, list(_spans(message, at, count, self._names)))
            elif kind == _BEAT:
                self.comm.barrier()
            elif kind == _PAUSE:
                return True
            else:
                with contextlib.suppress(CommunicationError):
                    self.comm.barrier()
                return False

    def _gathered(self, logits: Tensor) -> Tensor:
        """Send the logits of this rank's vocabulary shard to the driver."""
        counts = [len(logits) * width for width in self._widths]
        self.comm.gather(logits.reshape(-1), None, counts=counts)
        return logits


class _Steps:
    """Sends the steps to the workers."""

    def __init__(self, comm: Communicator, adapters: Sequence[str]) -> None:
        self.changes = array("i")
        """The changes to the store's memory since the last message."""
        self._comm, self._channel = comm, _Channel(comm)
        self._numbers = {name: number for number, name in enumerate(adapters)}  # in the workers' order
        self._failure: str | None = None

    def send(self, kind: int, spans: Sequence[Span] = ()) -> None:
        message = array("i", (kind, len(self.changes) // _CHANGE, len(spans)))
        message += self.changes
        for span in spans:
            adapter = -1 if span.adapter is None else self._numbers[span.adapter]
            message.extend((span.start, span.logits, adapter, len(span.tokens), len(span.blocks)))
            message.extend(span.tokens)
            message.extend(span.blocks)
        del self.changes[:]
        self._channel.send(message)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Return a context manager that converts errors to `RanksFailed`."""
        # after a failed or interrupted step, the ranks may have made different collective calls
        if self._failure is not None:
            raise RanksFailed(self._failure)
        try:
            yield
        except Exception as error:
            self._failure = str(error)
            raise RanksFailed(self._failure) from error
        except BaseException:
            self._failure = "a step was interrupted"
            raise

    def beat(self) -> None:
        with self.together():
            self.send(_BEAT)
            self._comm.barrier()

    def pause(self) -> None:
        with self.together():
            self.send(_PAUSE)

    def close(self) -> None:
        """Stop the workers."""
        if self._failure is None:
            with contextlib.suppress(CommunicationError):
                self.send(_STOP)
                self._comm.barrier()


class _RecordedMemory(Memory):
    """Memory that records its changes for the workers."""

    def __init__(self, shapes: Sequence[LayerShape], changes: array[int]) -> None:
        self._changes = changes
        super().__init__(shapes)

    def resize(self, blocks: int, length: int, kept: int, stored: int) -> None:
        self._changes.extend((_RESIZE, blocks, length, kept, stored))
        super().resize(blocks, length, kept, stored)

    def move(self, source: int, target: int, stored: int) -> None:
        self._changes.extend((_MOVE, source, target, stored, 0))
        super().move(source, target, stored)


class _Channel:
    """Broadcasts messages of 32-bit integers from rank 0."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._head = comm.empty(HEAD, dtype=torch.int32)
        self._broadcast = comm.broadcast_init(self._head)  # for the beginning of every message

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


def _widths(vocabulary: int, ranks: int, *, remote: bool) -> list[int]:
    """Return the width of each rank's vocabulary shard, which is 0 for a `RemoteDriver`."""
    computing = ranks - remote
    chunks = [chunk(vocabulary, computing, rank) for rank in range(computing)]
    return [0] * remote + [end - start for start, end in chunks]


def _gather(comm: Communicator, own: Tensor, widths: Sequence[int]) -> Tensor:
    """Gather the logits of all vocabulary shards on the driver, and return fp32 logits (tokens, vocabulary)."""
    counts = [len(own) * width for width in widths]
    every = [torch.empty(count) for count in counts]
    comm.gather(own.reshape(-1), every, counts=counts)
    return torch.cat([part.view(len(own), -1) for part in every if len(part)], -1)


def _spans(message: Sequence[int], at: int, count: int, adapters: Sequence[str]) -> Iterator[Span]:
    for _ in range(count):
        start, logits, adapter, tokens, blocks = message[at : at + 5]
        at += 5
        own, at = message[at : at + tokens], at + tokens
        yield Span(own, start, message[at : at + blocks], logits, None if adapter < 0 else adapters[adapter])
        at += blocks
