"""Data parallelism: reduce gradients in buckets over the ranks, during the backward pass.

A bucket is reduced as soon as all its gradients are complete (Li et al., 2020, "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training").  All ranks that reduce a bucket use the same order of buckets.  The first step
uses the reverse order of the parameters.  Later steps use the order in which buckets were completed in the first
step.  If weights are gathered, reductions and gathers share one order (`zero.call_order`).

With `zero` 2 and 3, a rank holds few unsharded gradients at a time (`zero.buffer_pool`).  If the next bucket in the
order is incomplete and too many later buckets wait for it, the rank reduces the incomplete bucket without the missing
gradients.  The order stays the same on all ranks.  At the end of the pass, ranks agree on the buckets that received
gradients after their reduction, and reduce these buckets again.  The second result is added to the first.  After the
first step, a bucket does not wait for parameters that have never had a gradient on any rank.

The path of a gradient:

    GradientReducer._hook           called by autograd when the gradient of a parameter is complete
    Bucket.accumulate               the gradient is in the buffer of its bucket
    Bucket.reduce_async             all gradients in the bucket are complete: the collective starts
    Bucket.wait                     the bucket has the average, or this rank's shard of it
    OptimizerShards.set_gradients   the optimizer gets the average as `.grad`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from farandole.comm.communicator import Communicator
from farandole.parallel.bucket import Bucket
from farandole.parallel.buffers import ReplicatedBuffers
from farandole.parallel.loss_parameters import LossParameters
from farandole.parallel.optimizers.shards import GradientNorms, OptimizerShards
from farandole.parallel.zero.gatherer import Gatherer

_REENTRANT = (
    "if the model uses a reentrant checkpoint, which runs a nested backward pass, pass use_reentrant=False to "
    "torch.utils.checkpoint, or use Plan(recompute=...)"
)


class StepEvents(Protocol):
    """Receives the events of a step."""

    def begin_step(self) -> None:
        """Handle the start of a step, after the previous gradients have been cleared."""

    def begin_pass(self) -> None:
        """Handle the start of a backward pass.  An exception raised here stops the pass."""

    def before_reduction(self, number: int) -> None:
        """Process bucket `number` immediately before its reduction."""

    def end_step(self) -> None:
        """Handle the end of a step, after the gradients have been averaged."""


@dataclass
class _Queue:
    """The buckets of one group of ranks, in reduction order; `current[:next]` were reduced in this pass."""

    ranks: tuple[int, ...]
    order: list[int] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    """The buckets that are reduced in this pass, in order."""
    next: int = 0


class GradientReducer:
    """Reduces each bucket as soon as a backward pass has completed its gradients.

    Args:
        buckets: the buckets, in the order in which a backward pass is expected to complete them.
        shards: for each bucket, the tensors that the optimizer updates.
        buffers: the buffers of the model.
        comm: the communicator of all ranks.
        norms: the cached norms of averaged gradients.
        every_pass: whether every backward pass reduces gradients, because unsharded gradients are not kept.  False with
            a pipeline.
        by_stage: whether a pipeline runs the backward passes, so that gradients are reduced only within `completing`
            and at the end of the step.
        gatherer: the object that gathers weights, if they are sharded.
        loss_parameters: the parameters that are hidden from the loss until a backward pass begins.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        shards: Sequence[OptimizerShards],
        buffers: ReplicatedBuffers,
        comm: Communicator,
        norms: GradientNorms,
        *,
        every_pass: bool,
        by_stage: bool,
        events: StepEvents,
        gatherer: Gatherer | None,
        loss_parameters: LossParameters,
    ) -> None:
        self.waited_s = 0.0
        """The total time in seconds that this rank has waited for other ranks."""
        self.waits: list[tuple[float, float]] = []
        """The start and end of each wait in this step, in seconds of `time.perf_counter`."""
        self.buckets, self.shards = list(buckets), list(shards)
        self.buffers = buffers
        self.buffers_changed = False
        """Whether any rank has changed a buffer in this step."""
        self.reduced = False
        """Whether the last pass of the step has ended, so that gradients are averages."""
        self._model, self._comm, self._events = model, comm, events
        self._every_pass, self._norms, self._gatherer = every_pass, norms, gatherer
        self._by_stage = by_stage
        self._loss_parameters = loss_parameters
        self._accumulating = self._sets_marks = False
        self._completing: Collection[int] = ()
        self._in_pass = False
        self._queues: dict[tuple[int, ...], _Queue] = {}
        for number, bucket in enumerate(self.buckets):
            ranks = bucket.plan.ranks.column
            self._queues.setdefault(ranks, _Queue(ranks)).order.append(number)
        self._begin_queues()
        self._completed: dict[int, None] | None = {}  # buckets of the first step, in the order of completion
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        device = parameters[0].device if parameters else torch.device("cpu")
        # which parameters had a gradient on any rank, in the order of the buckets
        self._used = torch.zeros(len(parameters), dtype=torch.uint8, device=device)
        self._used_by_bucket = self._used.split([len(bucket.parameters) for bucket in buckets])
        # the indices of these parameters among all parameters on the mesh
        numbers = [norms.number(name) for bucket in buckets for name in bucket.plan.names]
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=device)
        if gatherer is not None:
            gatherer.before_reduction, gatherer.without_gradients = (
                self._before_reduction,
                self._without_gradients,
            )
        # by bucket number and parameter index in the bucket
        self._hooks: dict[tuple[int, int], RemovableHandle] = {}
        self._removed = [(n, i) for n, each in enumerate(self.buckets) for i in range(len(each.parameters))]
        self._register_hooks()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()

    # ---- steps ----

    @contextmanager
    def no_sync(self, *, marks: bool = False) -> Iterator[None]:
        """Return a context manager in which gradients are not reduced; see `Engine.no_sync`.

        If `marks` is set, the `.grad` of parameters may be cleared between passes.
        """
        self._accumulating, self._sets_marks = True, marks
        try:
            yield
        finally:
            self._accumulating = self._sets_marks = False

    @contextmanager
    def completing(self, parameters: Collection[int]) -> Iterator[None]:
        """Return a context manager in which the gradients of `parameters` are completed and reduced.

        `parameters` contains the `id` of each parameter; see `Engine.completing`.
        """
        self._completing = parameters
        self._register_hooks()
        for queue in self._queues.values():
            self._begin_part(queue)
        try:
            yield
        finally:
            self._completing = ()
        for queue in self._queues.values():
            for number in queue.current:
                bucket = self.buckets[number]
                for index, parameter in enumerate(bucket.parameters):
                    if id(parameter) in parameters and not bucket.has_arrived(index):
                        bucket.is_complete(index)
                self._launch_complete(queue)

    def synchronize(self) -> None:
        """Finish averaging the gradients of the step; see `Engine.synchronize`."""
        if not self.reduced:
            self._discard_cleared()
            self.end_pass(last=True)

    def begin_step(self) -> None:
        """Discard all gradients, and begin a new step."""
        self._register_hooks()
        self._in_pass = False
        self.reduced = False
        self.waits = []
        self._used.zero_()
        for shards in self.shards:
            shards.clear()
        self._begin_queues()
        self._events.begin_step()

    @property
    def is_unfinished(self) -> bool:
        """Return whether this rank has gradients that are not yet averaged."""
        return not self.reduced and (self._in_pass or any(bucket.holds_gradients for bucket in self.buckets))

    def any_unfinished(self) -> bool:
        """Return whether the step is unfinished on any rank.

        This is a collective call unless the gradients are already averaged.
        """
        if self.reduced:
            return False
        flag = self._used.new_full((1,), self.is_unfinished)
        if self._comm.size > 1:
            self._comm.all_reduce(flag, "max")
        return bool(flag)

    def discard(self, parameters: Collection[int]) -> None:
        """Discard the gradients of `parameters` if the step is unfinished.

        `parameters` contains the `id` of each parameter.  A step is unfinished if its passes ran within `no_sync`, or if
        its last pass failed.
        """
        if not self.is_unfinished:
            return
        if all(id(parameter) in parameters for bucket in self.buckets for parameter in bucket.parameters):
            self.begin_step()
            return
        self._in_pass = False
        for bucket, shards, used in zip(self.buckets, self.shards, self._used_by_bucket, strict=True):
            for index, parameter in enumerate(bucket.parameters):
                if id(parameter) in parameters:
                    bucket.discard(index)
                    shards.zero_result(index)
                    used[index] = 0

    @property
    def all_cleared(self) -> bool:
        """Return whether the gradients of the last step have been cleared."""
        return self.reduced and all(shards.all_cleared for shards in self.shards)

    def join_pass(self, *, last: bool) -> None:
        """Join the reductions of the other ranks' backward pass without contributing gradients."""
        if self._every_pass or last:
            self._begin_or_resume()
            self.end_pass(last=last)

    def end_pass(self, *, last: bool) -> None:
        """Reduce all buckets of this backward pass; after the `last` pass of a step, set the optimizer's gradients."""
        if self._gatherer is not None:
            self._gatherer.end_pass("backward")
        else:
            for queue in self._queues.values():
                self._launch(queue, len(queue.current))
        started = time.perf_counter()
        if last or self._every_pass:
            self._exchange_flags(last=last)
        for bucket in self.buckets:
            bucket.advance()
        for bucket in self.buckets:
            bucket.wait()
            bucket.begin_pass()
        if last:
            self._end_step()
        self._begin_queues()
        if self._comm.size > 1:
            self.waits.append((started, time.perf_counter()))
            self.waited_s += self.waits[-1][1] - started

    def _exchange_flags(self, *, last: bool) -> None:
        """Agree with all ranks on the buckets to reduce again and, after the last pass, the parameters with gradients."""
        late = torch.zeros_like(self._used)
        if self._gatherer is None and self._every_pass:
            for number, flags in enumerate(late.split([len(bucket.parameters) for bucket in self.buckets])):
                if self.buckets[number].is_late:
                    flags.fill_(1)
                    self._mark_used(number)
        some_unused = not bool(self._used.all())
        if self._comm.size > 1:
            flags = self._used.new_zeros((2, len(self._norms.names) + 1))
            flags[0, self._numbers], flags[1, self._numbers] = self._used, late
            flags[0, -1], flags[1, -1] = self.buffers.changed, some_unused
            self._comm.all_reduce(flags, "max")
            late, some_unused = flags[1, self._numbers], bool(flags[1, -1])
            if last:
                self._used.copy_(flags[0, self._numbers])
                self.buffers_changed = bool(flags[0, -1])
        if last and some_unused and self._completed is not None and self._gatherer is not None:
            self._gatherer.forget_order()  # the ranks agree on the next order without unused parameters
        if bool(late.any()):
            again = {
                number
                for number, flags in enumerate(
                    late.split([len(bucket.parameters) for bucket in self.buckets])
                )
                if bool(flags.any())
            }
            for queue in self._queues.values():
                self._reduce([number for number in queue.order if number in again])

    def _end_step(self) -> None:
        if self._completed is not None and self._gatherer is None and self._comm.size > 1:
            self._agree_on_order(list(self._completed))
        self._completed = None
        self._norms.clear()
        for bucket, shards, flags in zip(self.buckets, self.shards, self._used_by_bucket, strict=True):
            used = flags.tolist()
            shards.set_gradients(used, self._norms)
            if bucket.plan.every_pass and self._every_pass:  # only then, a late gradient is reduced again
                bucket.expect(used)
        self.reduced = True
        self._events.end_step()

    # ---- a backward pass ----

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        bucket = self.buckets[number]
        queue = self._queues[bucket.plan.ranks.column]

        def accumulated(parameter: Tensor) -> None:
            hooks = parameter._post_accumulate_grad_hooks
            if len(hooks) > 1 and next(reversed(hooks.values())) is not accumulated:
                raise RuntimeError(
                    f"{self._name(parameter)} has a hook that would change a gradient during its reduction: call "
                    f"register_post_accumulate_grad_hook before parallelize, or use register_hook"
                )
            is_accumulating = not (self._reduces or self._completing or queue.next)
            if self._in_pass and is_accumulating and bucket.holds(index, parameter.grad):
                self._skip_hook(number, index)
                return  # the common case in all micro-batches between the first and the last
            reduces = self._reduces or id(parameter) in self._completing
            waits = self._is_by_stage(number) and not reduces
            if not self._in_pass:
                self._begin_pass()
            elif (
                not waits
                and self._gatherer is None
                and bucket.was_reduced
                and (bucket.has_arrived(index) or not self._every_pass)
            ):
                raise RuntimeError(
                    f"{self._name(parameter)} received a gradient after its gradients had been reduced in "
                    "the same backward pass: call engine.zero_grad() after a failed pass; "
                    f"{_REENTRANT}"
                )
            if waits:
                return  # autograd accumulates the gradient until a pass of the stage reduces it
            if self._every_pass:
                self._start_early(bucket)
            self._accumulate(number, index)
            if not reduces:
                self._skip_hook(number, index)
                return
            complete = bucket.is_complete(index)
            if self._completed is not None and (complete or self._every_pass):
                self._completed.pop(number, None)
                self._completed[number] = None
            if not complete:
                return
            if self._gatherer is not None:
                self._gatherer.reduce(number)
            else:
                self._launch_complete(queue)

        return accumulated

    def _skip_hook(self, number: int, index: int) -> None:
        """Temporarily remove the hook, if autograd adds further gradients directly to the buffer."""
        if self._by_stage and self.buckets[number].is_in_place:
            self._hooks.pop((number, index)).remove()
            self._removed.append((number, index))

    def _register_hooks(self) -> None:
        for number, index in self._removed:
            parameter = self.buckets[number].parameters[index]
            hook = self._hook(number, index)
            self._hooks[number, index] = parameter.register_post_accumulate_grad_hook(hook)
        self._removed = []

    def _accumulate(self, number: int, index: int) -> None:
        """Move an accumulated gradient into its bucket."""
        bucket, gradient = self.buckets[number], self.shards[number].take_accumulated(index)
        if bucket.in_flight:  # it was reduced in order without this gradient, and is reduced again
            bucket.wait()
        for earlier in bucket.in_the_way():
            earlier.wait()
        bucket.accumulate(index, gradient)

    @property
    def _reduces(self) -> bool:
        """Return whether the current backward pass reduces gradients."""
        return self._every_pass or not self._accumulating

    def _begin_pass(self) -> None:
        self._events.begin_pass()
        self._loss_parameters.show()
        self._begin_or_resume()
        self._in_pass = True
        if self._gatherer is not None:
            self._gatherer.begin_backward()
        # private, but used by DDP and FSDP: autograd has no public hook at the end of a pass
        Variable._execution_engine.queue_callback(self._passed)

    def _begin_or_resume(self) -> None:
        """Begin a step, or prepare to add this pass's gradients to the averages of the last pass."""
        if self.all_cleared:
            self.begin_step()
        elif self.reduced:
            self.reduced = False
            for shards, used in zip(self.shards, self._used_by_bucket, strict=True):
                shards.resume(used)
        else:
            self._discard_cleared()

    def _discard_cleared(self) -> None:
        """Discard the gradients of parameters whose `.grad` has been cleared."""
        if cleared := {id(parameter) for shards in self.shards for parameter in shards.cleared_marks()}:
            self.discard(cleared)

    def _passed(self) -> None:
        """Finish a backward pass; reduce its gradients unless they are only accumulated."""
        if self._reduces:
            self.end_pass(last=not self._accumulating)
        self._in_pass = False
        if self._sets_marks:
            for shards, used in zip(self.shards, self._used_by_bucket, strict=True):
                received = shards.bucket.received
                shards.mark_unfinished(
                    [a or b for a, b in zip(received, used.tolist(), strict=True)], self._norms
                )

    # ---- the order of reductions ----

    def _begin_queues(self) -> None:
        for queue in self._queues.values():
            queue.current, queue.next = [n for n in queue.order if not self._is_by_stage(n)], 0

    def _is_by_stage(self, number: int) -> bool:
        """Return whether a bucket is reduced in each pass of a pipeline stage, within `completing`."""
        return self.buckets[number].plan.every_pass and not self._every_pass

    def _begin_part(self, queue: _Queue) -> None:
        """Begin a pass of one stage, and queue the stage's buckets that are reduced in every pass."""
        of_stage = [
            number
            for number in queue.order
            if self._is_by_stage(number)
            and any(id(parameter) in self._completing for parameter in self.buckets[number].parameters)
        ]
        if not of_stage:
            return
        queue.current, queue.next = of_stage, 0
        for number in of_stage:
            bucket = self.buckets[number]
            bucket.begin_pass()
            for index, parameter in enumerate(bucket.parameters):
                if parameter.grad is not None:  # from an earlier half of the pass
                    bucket.is_complete(index)

    def _launch_complete(self, queue: _Queue) -> None:
        """Start the reductions of complete buckets, in order."""
        end = queue.next
        while end < len(queue.current) and self.buckets[queue.current[end]].ready:
            end += 1
        self._launch(queue, end)

    def _launch(self, queue: _Queue, end: int) -> None:
        """Start the reductions of the buckets before position `end` of the queue."""
        start, queue.next = queue.next, max(queue.next, end)
        self._reduce(queue.current[start:end], queue.current[:start])

    def _reduce(self, numbers: Sequence[int], before: Sequence[int] = ()) -> None:
        """Start the reductions of the buckets `numbers`; `before` are the earlier buckets of this pass."""
        for place, number in enumerate(numbers):
            bucket = self.buckets[number]
            for index, parameter in enumerate(bucket.parameters if self._is_by_stage(number) else ()):
                if parameter.grad is not None:  # from an earlier half of the pass
                    self._accumulate(number, index)
            for earlier in (bucket, *bucket.in_the_way()):
                if earlier.in_flight:
                    earlier.wait()
            self._before_reduction(number)
            bucket.reduce_async()
            if bucket.has_two_stages:  # the second reductions of earlier buckets, over replicas, can start
                for other in (*before, *numbers[:place]):
                    self.buckets[other].advance()

    def _start_early(self, bucket: Bucket) -> None:
        """Reduce incomplete buckets until `bucket` can allocate memory, or no other reduction can start early."""
        while (first := bucket.first_to_launch()) is not None:
            if self._gatherer is not None:
                if not self._gatherer.reduce_early(self.buckets.index(first)):
                    return
                continue
            queue = self._queues[first.plan.ranks.column]
            end = self._early_end(queue)
            if end is None:
                return
            self._launch(queue, end)

    def _early_end(self, queue: _Queue) -> int | None:
        """Return the end position (exclusive) of the buckets to reduce early; None if too little memory is released."""
        released = late = 0
        for place in range(queue.next, len(queue.current)):
            bucket = self.buckets[queue.current[place]]
            released += bucket.held_nbytes
            late += 0 if bucket.ready else bucket.whole_nbytes
            # the reduced buckets must release at least as much memory as their late gradients can need
            if released and released >= late:
                return place + 1
        return None

    def _before_reduction(self, number: int) -> None:
        self.buckets[number].discard_cleared()
        self._mark_used(number)
        self._events.before_reduction(number)

    def _mark_used(self, number: int) -> None:
        """Record which parameters of a bucket have a gradient on this rank."""
        received, used = self.buckets[number].received, self._used_by_bucket[number]
        used.bitwise_or_(torch.tensor(received, dtype=torch.uint8, device=used.device))

    def _without_gradients(self) -> None:
        """Join the reductions of a backward pass in which this rank has no gradients."""
        if not self._in_pass:
            self._begin_or_resume()
            self.end_pass(last=not self._accumulating)

    def _agree_on_order(self, completed: list[int]) -> None:
        """Set each queue's order for later steps: the order in which the queue's first rank completed the buckets."""
        # a bucket with an unused parameter does not delay other buckets: it is reduced at the end of the pass (`zero` 0
        # and 1), or after its last gradient (`zero` 2 and 3).
        # bucket numbers differ between the stages of a pipeline, but parameter names do not
        names = [bucket.plan.names[0] for bucket in self.buckets]
        orders = self._comm.all_gather_object([names[number] for number in completed])
        for queue in self._queues.values():
            agreed = {name: place for place, name in enumerate(orders[queue.ranks[0]])}
            queue.order.sort(key=lambda number: agreed.get(names[number], len(agreed)))

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, known in self._model.named_parameters() if known is parameter)


def has_engine(parameter: Tensor) -> bool:
    """Return whether a `GradientReducer` reduces the gradients of `parameter`."""
    hooks = parameter._post_accumulate_grad_hooks or {}  # private: torch has no public list of them
    names = [getattr(hook, "__qualname__", "") for hook in hooks.values()]
    return any(name.startswith(GradientReducer.__qualname__) for name in names)
