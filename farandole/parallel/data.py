"""Data parallelism: gradients in buckets, reduced over the ranks while a backward pass goes on.

Gradients lie in flat buckets, filled in the order in which the backward pass produces them, from the last block to
the first.  A bucket is reduced as soon as it is full, while the backward pass goes on (Li et al., 2020, "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training").  Buckets are reduced in the same order on every
rank, whatever order their gradients arrive in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from farandole.comm.communicator import Communicator
from farandole.parallel.buckets import Bucket
from farandole.parallel.buffers import BufferAverage
from farandole.parallel.gathering import Gathering
from farandole.parallel.hybrid import Division
from farandole.parallel.nonfinite import GradientWatch
from farandole.parallel.sharded_gradient import GradientNorms

_REENTRANT = (
    "a reentrant checkpoint runs backward passes of its own within one: give torch.utils.checkpoint use_reentrant=False, "
    "or use recompute= of the plan"
)


class StepEvents(Protocol):
    """What is told of the backward passes of a step."""

    def begin_step(self) -> None:
        """The gradients of the step before are gone."""

    def begin_pass(self) -> None:
        """A backward pass has begun; an exception ends it."""

    def end_step(self) -> None:
        """The gradients are the averages of the step."""


class GradientReducer:
    """Hooks the parameters of buckets, and reduces the buckets that backward passes fill as stage `zero` has it.

    `waited_s` adds up the seconds in which this rank had nothing to do but wait for others.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        comm: Communicator,
        division: Division,
        zero: int,
        *,
        events: StepEvents,
        watch: GradientWatch | None,
        gathering: Gathering | None,
    ) -> None:
        self.zero = zero
        self.waited_s = 0.0
        self.buckets = list(buckets)
        self.buffers = BufferAverage(model, comm)
        self.buffers_changed = False
        """Whether any rank has changed a buffer in the step."""
        self.reduced = False
        """Whether the gradients are the averages of a step that has had its last pass."""
        self._model, self._comm, self._events = model, comm, events
        self._watch, self._gathering = watch, gathering
        self._has_replicas = division.replicas is not None  # a shard is averaged over them in the end
        self._accumulating = False
        self._in_pass = False
        self._next = 0  # the first bucket that is not reduced in this pass
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        device = parameters[0].device if parameters else torch.device("cpu")
        # which parameters any rank had a gradient for, in the order of the buckets, and whether any has changed buffers
        self._used = torch.zeros(len(parameters) + 1, dtype=torch.uint8, device=device)
        self._used_by_bucket = self._used[:-1].split([len(bucket.parameters) for bucket in buckets])
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        divides = zero > 0 and division.shards.size > 1
        self._norms = GradientNorms(
            self.shares,
            [names[id(parameter)] for parameter in parameters],
            device,
            division.shards if divides else None,
        )
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(number, bucket, index))
            for number, bucket in enumerate(buckets)
            for index, parameter in enumerate(bucket.parameters)
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Engine.no_sync`."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def synchronize(self) -> None:
        """See `Engine.synchronize`."""
        if not self.reduced:
            self.end_pass(last=True)

    def begin_step(self) -> None:
        """Forget what earlier passes gave."""
        self._in_pass = False
        self.reduced = False
        self._next = 0
        self._used.zero_()
        if self._watch is not None:
            self._watch.clear()
        for bucket in self.buckets:
            bucket.clear()
        self._events.begin_step()

    @property
    def all_taken(self) -> bool:
        """Whether the gradients of the last step are wanted no more."""
        return self.reduced and all(bucket.taken for bucket in self.buckets)

    def shares(self) -> Iterator[tuple[int, Tensor]]:
        """(number of a parameter, this rank's part of its averaged gradient)."""
        first = 0
        for bucket in self.buckets:
            yield from ((first + index, share) for index, share in bucket.handed_out())
            first += len(bucket.parameters)

    def forget_norms(self) -> None:
        """The gradients have been changed."""
        self._norms.clear()

    def join_pass(self, *, last: bool) -> None:
        """Take part in a pass of the other ranks, without gradients."""
        if self.zero >= 2 or last:
            self._begin_or_resume()
            self.end_pass(last=last)

    def end_pass(self, *, last: bool) -> None:
        """Reduce what this backward pass has left; after the `last` one of a step, hand out the gradients."""
        self._launch_until(len(self.buckets))
        started = time.perf_counter()
        for bucket in self.buckets:
            bucket.gradients.advance()
        for bucket in self.buckets:
            bucket.gradients.finish()
            bucket.begin_pass()
        self._next = 0
        if last:
            self._end_step()
        if self._comm.size > 1:
            self.waited_s += time.perf_counter() - started

    def wait_for(self, number: int) -> bool:
        """End the reduction of bucket `number`, if it was started; whether it was."""
        gradients = self.buckets[number].gradients
        launched = gradients.launched
        if launched:
            gradients.finish()
        return launched

    # ---- a backward pass ----

    def _hook(self, number: int, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
        def received(parameter: Tensor) -> None:
            if not self._in_pass:
                self._begin_pass()
            elif number < self._next:
                raise RuntimeError(
                    f"{self._name(parameter)} got a gradient after its gradients had been reduced in the same backward "
                    f"pass, or a pass that failed was not followed by zero_grad() of the engine; {_REENTRANT}"
                )
            bucket.gradients.receive(index, bucket.take_gradient(index))
            if self._reduces and bucket.complete(index):
                self._launch_full()

        return received

    @property
    def _reduces(self) -> bool:
        """Whether the backward pass under way is reduced."""
        return self.zero >= 2 or not self._accumulating

    def _begin_pass(self) -> None:
        self._events.begin_pass()
        self._begin_or_resume()
        self._in_pass = True
        # private, but what DDP and FSDP use: autograd has no other hook at the end of a pass
        Variable._execution_engine.queue_callback(self._passed)

    def _begin_or_resume(self) -> None:
        """Begin a step, or have this pass add to the averages of the last one."""
        if self.all_taken:
            self.begin_step()
        elif self.reduced:
            self.reduced = False
            for bucket, used in zip(self.buckets, self._used_by_bucket, strict=True):
                bucket.resume(used)

    def _passed(self) -> None:
        """Autograd has ended a backward pass."""
        if self._gathering is not None:
            self._gathering.forget()
        if self._reduces:
            self.end_pass(last=not self._accumulating)
        self._in_pass = False

    def _launch_full(self) -> None:
        """Start the reduction of full buckets, none before those that come before it."""
        end = self._next
        while end < len(self.buckets) and self.buckets[end].full:
            end += 1
        self._launch_until(end)

    def _launch_until(self, end: int) -> None:
        for number in range(self._next, end):
            gradients = self.buckets[number].gradients
            used = self._used_by_bucket[number]
            used.bitwise_or_(torch.tensor(gradients.received, dtype=torch.uint8, device=used.device))
            if self._watch is not None:
                self._watch.look(number)
            gradients.launch()
            if self._has_replicas:
                for before in self.buckets[:number]:
                    before.gradients.advance()
        self._next = max(self._next, end)

    def _end_step(self) -> None:
        """Hand out the averages to the parameters that any rank has used."""
        if self._comm.size > 1:
            self._used[-1] = self.buffers.changed
            self._comm.all_reduce(self._used, "max")
        self.buffers_changed = bool(self._used[-1])
        self._norms.clear()
        first = 0
        for bucket, used in zip(self.buckets, self._used_by_bucket, strict=True):
            bucket.hand_out(used.tolist(), self._norms, first)
            first += len(used)
        self.reduced = True
        self._events.end_step()

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, known in self._model.named_parameters() if known is parameter)
