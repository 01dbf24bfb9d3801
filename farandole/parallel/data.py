"""Data parallelism: every rank has the whole model and its own samples; gradients are averaged.

The gradients live in flat buckets, filled in the order in which the backward pass produces them, from the
last block to the first.  A bucket is reduced as soon as it is full, while the backward pass goes on
(Li et al., 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training").  Buckets are
reduced in the same order on every rank, whatever order their gradients arrive in.

    replica = DataParallel(model, comm)
    with replica.no_sync():
        loss(model(first)).backward()       # accumulates, communicates nothing
    loss(model(second)).backward()          # buckets are reduced as they fill
    replica.synchronize()                   # .grad is now the average over ranks
    replica.clip(1.0)
    optimizer.step()
    replica.zero_grad()

Each rank's loss is a mean over its own samples; when all ranks have equally many, the gradient is the one
of a single process with all samples (times the number of backward passes, as always in accumulation).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.parallel.buckets import GradientBucket, make_buckets, total_norm

BUCKET_BYTES = 4 << 20


class DataParallel:
    """Keeps the gradients of `model` equal on all ranks of `comm`.

    At construction the parameters and buffers of rank 0 are copied to all ranks.  Frozen parameters are
    left alone, tied ones reduced once.  A parameter without a gradient on some ranks counts as zero
    there; without one on all ranks, its `.grad` stays None.  With one rank nothing is communicated.

    A `compression` (`Int8()`, ...) is for what crosses hosts; gradients are then no longer those of one process, but
    with error feedback what a step misses comes in later ones.  Raises TypeError or ValueError where
    they cannot be compressed.

    `waited_s` adds up the seconds in which this rank had nothing to do but wait for others.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        bucket_bytes: int = BUCKET_BYTES,
        compression: Compression | None = None,
    ) -> None:
        self.model = model
        self.waited_s = 0.0
        self._comm = comm
        self._accumulating = False
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buckets = make_buckets(reversed(trained), comm, bucket_bytes, compression)
        self._next = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, index))
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
        ]
        self._start_equal()

    def _start_equal(self) -> None:
        if self._comm.size == 1:
            return
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                for part in _stored(tensor.detach()):
                    self._comm.broadcast(part, root=0)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes accumulate gradients and reduce nothing."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def synchronize(self) -> None:
        """Reduce what is left and wait until every gradient is the average over ranks."""
        self._launch_until(len(self.buckets))
        started = time.perf_counter()
        for bucket in self.buckets:
            bucket.finish()
        if self._comm.size > 1:
            self.waited_s += time.perf_counter() - started

    def gradient_norm(self) -> float:
        """The global norm: over all parameters, of the averaged gradients.  The same on all ranks."""
        return total_norm(bucket.gradients for bucket in self.buckets)

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)

    def compression_state(self) -> dict[str, torch.Tensor]:
        """What compression remembers on this rank, by name, for a checkpoint; `load_compression` goes on from it."""
        return {
            f"{number}.{name}": value
            for number, bucket in enumerate(self.buckets)
            if bucket.compressor is not None
            for name, value in bucket.compressor.state.items()
        }

    def load_compression(self, state: Mapping[str, torch.Tensor]) -> None:
        """Remember what this rank did when `state` was saved."""
        for number, bucket in enumerate(self.buckets):
            if bucket.compressor is not None:
                own = f"{number}."
                bucket.compressor.load(
                    {name.removeprefix(own): t for name, t in state.items() if name.startswith(own)}
                )

    def rescale(self, factor: float) -> None:
        """Gradients are from now on `factor` times as large, as the loss is: so is what compression remembers."""
        for bucket in self.buckets:
            if bucket.compressor is not None:
                bucket.compressor.scale_residuals(factor)

    def clip(self, max_norm: float) -> float:
        """Shrink the gradients so that their global norm is at most `max_norm`; returns what it was."""
        norm = self.gradient_norm()
        if norm > max_norm:
            self.scale_gradients(max_norm / norm)
        return norm

    def zero_grad(self) -> None:
        """Start the next step: every `.grad` is None."""
        self._next = 0
        for bucket in self.buckets:
            bucket.clear()

    def close(self) -> None:
        """Let go of the model: remove the hooks and the gradients."""
        for hook in self._hooks:
            hook.remove()
        self.zero_grad()

    def _hook(self, bucket: GradientBucket, index: int) -> Callable[[torch.Tensor], None]:
        def received(_: torch.Tensor) -> None:
            bucket.receive(index)
            if not self._accumulating and bucket.complete(index):
                self._launch_full()

        return received

    def _launch_full(self) -> None:
        """Start the reduction of full buckets, none before those that come before it."""
        end = self._next
        while end < len(self.buckets) and self.buckets[end].full:
            end += 1
        self._launch_until(end)

    def _launch_until(self, end: int) -> None:
        for bucket in self.buckets[self._next : end]:
            bucket.launch()
        self._next = max(self._next, end)


def _stored(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in which the values lie: `tensor` itself, or those that a quantized one consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _stored(getattr(tensor, name))]
