"""Gradients in buckets, reduced over the ranks while a backward pass goes on.

Gradients lie in flat buckets, filled in the order in which the backward pass produces them, from the last block to
the first.  A bucket is reduced as soon as it is full, while the backward pass goes on (Li et al., 2020, "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training").  Buckets are reduced in the same order on every
rank, whatever order their gradients arrive in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from farandole.comm.communicator import Communicator
from farandole.parallel.buckets import Bucket
from farandole.parallel.gathering import Gathering
from farandole.parallel.nonfinite import GradientWatch
from farandole.parallel.sharded_gradient import GradientNorms

_REENTRANT = (
    "a reentrant checkpoint runs backward passes of its own within one: give torch.utils.checkpoint use_reentrant=False, "
    "or use recompute= of the plan"
)


class Reduction:
    """Follows backward passes, and reduces the buckets that they fill as stage `zero` has it.

    `waited_s` adds up the seconds in which this rank had nothing to do but wait for others.
    """

    model: nn.Module
    _shards: Communicator

    def __init__(self, comm: Communicator, zero: int) -> None:
        self.zero = zero
        self.waited_s = 0.0
        self.buckets: list[Bucket] = []
        self._comm = comm
        self._accumulating = False
        self._in_pass = False
        self._reduced = False  # the gradients are the averages of a step that has had its last pass
        self._next = 0

    def _follow(
        self,
        buckets: Sequence[Bucket],
        watch: GradientWatch | None,
        gathering: Gathering | None,
        *,
        crosses: bool,
    ) -> None:
        """Begin, with these buckets; `crosses` says whether a shard is averaged over replicas in the end."""
        self.buckets = list(buckets)
        self._watch, self._gathering, self._crosses = watch, gathering, crosses
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        device = parameters[0].device if parameters else None
        # which parameters anybody had a gradient for, in the order of the buckets, and whether buffers changed on any rank
        self._used = torch.zeros(len(parameters) + 1, dtype=torch.uint8, device=device)
        self._used_by_bucket = self._used[:-1].split([len(bucket.parameters) for bucket in buckets])
        self._buffers_changed = False
        self._remember_buffers()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._norms = GradientNorms(
            self._shares,
            [names[id(parameter)] for parameter in parameters],
            device or torch.device("cpu"),
            self._shards if self.zero and self._shards.size > 1 else None,
        )
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(number, bucket, index))
            for number, bucket in enumerate(buckets)
            for index, parameter in enumerate(bucket.parameters)
        ]

    def _unfollow(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes accumulate gradients; with `zero` < 2 they communicate nothing.

        With `zero` >= 2 there is no memory to keep whole gradients in, so that every pass is reduced.
        """
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def synchronize(self) -> None:
        """Reduce what is left and wait until every gradient is the average over ranks.

        A backward pass outside of `no_sync` ends with it; it is for ranks that had none.
        """
        if not self._reduced:
            self._end_pass(last=True)

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

    def _all_taken(self) -> bool:
        """Whether the gradients of the last step are wanted no more."""
        return all(bucket.taken for bucket in self.buckets)

    def _begin_step(self) -> None:
        """Forget what earlier passes gave."""
        self._reduced = False
        self._next = 0
        self._used.zero_()
        if self._watch is not None:
            self._watch.clear()
        for bucket in self.buckets:
            bucket.clear()

    def _resume_step(self) -> None:
        """Have a further pass add to the averages."""
        self._reduced = False
        for bucket, used in zip(self.buckets, self._used_by_bucket, strict=True):
            bucket.resume(used)

    def _begin_pass(self) -> None:
        if self._reduced:
            if self._all_taken():
                self._begin_step()
            else:
                self._resume_step()
        self._in_pass = True
        # private, but what DDP and FSDP use: there is no other word of autograd at the end of a pass
        Variable._execution_engine.queue_callback(self._passed)

    def _passed(self) -> None:
        """Autograd has ended a backward pass."""
        if self._gathering is not None:
            self._gathering.forget()
        if self._reduces:
            self._end_pass(last=not self._accumulating)
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
            if self._crosses:
                for before in self.buckets[:number]:
                    before.gradients.advance()
        self._next = max(self._next, end)

    def _end_pass(self, *, last: bool) -> None:
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
            if self._comm.size > 1:
                self._used[-1] = self._buffer_versions() != self._known_buffers
                self._comm.all_reduce(self._used, "max")
            self._buffers_changed = bool(self._used[-1])
            first = 0
            self._norms.clear()
            for bucket, used in zip(self.buckets, self._used_by_bucket, strict=True):
                bucket.hand_out(used.tolist(), self._norms, first)
                first += len(used)
            self._reduced = True
        if self._comm.size > 1:
            self.waited_s += time.perf_counter() - started

    def _floating_buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]

    def _buffer_versions(self) -> list[tuple[int, int]]:
        # all of them: BatchNorm's kernel does not count changes of its statistics, but those of the number of batches
        return [(id(buffer), buffer._version) for buffer in self.model.buffers()]

    def _remember_buffers(self) -> None:
        """The buffers are the same on all ranks."""
        self._known_buffers = self._buffer_versions()

    def _shares(self) -> Iterator[tuple[int, Tensor]]:
        """(number of a parameter, this rank's part of its averaged gradient)."""
        first = 0
        for bucket in self.buckets:
            yield from ((first + index, share) for index, share in bucket.handed_out())
            first += len(bucket.parameters)

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, known in self.model.named_parameters() if known is parameter)

    def _settle(self, number: int) -> bool:
        """End the reduction of bucket `number`, if it was started; whether it was."""
        gradients = self.buckets[number].gradients
        launched = gradients.launched
        if launched:
            gradients.finish()
        return launched
