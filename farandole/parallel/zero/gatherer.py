"""Gather sharded weights block by block (`zero=3`).

In the forward and the backward pass, a block's weights are gathered while the preceding block computes, and released
soon after the block itself has computed.  Weights shared by several blocks, such as a tied embedding, stay gathered
until the last of these blocks has computed its forward pass.  All ranks gather in the same order (`call_order`), even
if they compute different blocks.

Autograd saves weights for the backward pass.  The saved weights would keep the gathered memory allocated.  Therefore
hooks (`torch.autograd.graph.saved_tensors_hooks`) replace a saved weight with its position in a group of weights.
When the backward pass requests the tensor, released weights are gathered again, and the tensor becomes a view of the
gathered weights.

An offloaded shard is read before its group is gathered.  Because the order of gathers is known, the read overlaps
with the computation of earlier groups.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from farandole.comm.communicator import Communicator
from farandole.comm.dynamo import excluded_from_dynamo
from farandole.parallel.bucket import Bucket
from farandole.parallel.zero.call_order import CallOrder, Kind
from farandole.parallel.zero.gathered_weights import GatheredWeights

CAPACITY = 3
"""The maximum number of groups that are gathered at a time: for the current, the previous and the next block."""

READ_AHEAD = 2
"""The number of groups whose offloaded shards are being read, in addition to the gathered groups."""

_KEPT = CAPACITY - 1
"""The number of groups that remain gathered between a forward pass and its backward pass."""


@dataclass(frozen=True)
class _SavedPlace:
    """The position of a saved tensor in a group's weights."""

    weights: GatheredWeights
    group: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(frozen=True)
class _SavedOutside:
    """A saved tensor that was packed by the hooks that enclose the gatherer's hooks."""

    # the gatherer calls these outer hooks itself, because autograd calls only the innermost hooks

    kept: Any  # the result of the outer `pack`
    unpack: Callable[[Any], Tensor]  # the outer `unpack`


def _enclosing_hooks() -> _Hooks | None:
    """Return the innermost active hooks for saved tensors, or None."""
    hooks: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


class Gatherer:
    """Gathers groups of weights before modules of `model` compute, and releases them afterwards.

    Args:
        groups: for each group, the weights that are gathered together.
        buckets: the gradient buckets; `CallOrder` orders their reductions and the gathers.
        needs: (module, indices of its groups) for each module that needs gathered weights.
        comm: the communicator of all ranks that compute the same modules.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Sequence[GatheredWeights]],
        buckets: Sequence[Bucket],
        needs: Sequence[tuple[nn.Module, Sequence[int]]],
        comm: Communicator,
    ) -> None:
        self._groups = [list(group) for group in groups]
        self._recent: list[int] = []  # gathered groups and groups being gathered, the latest last
        self._users = [0] * len(groups)  # the number of running modules that need each group
        self._needed = Counter(
            group for _, numbers in needs for group in numbers
        )  # the number of modules that need each group
        self._later: Counter[int] = (
            Counter()
        )  # the number of modules that need each group and have not ended in this forward pass
        self._depth = 0  # the nesting depth of the running modules
        self._handled: BaseException | None = None
        self._whole_contexts = 0
        self._contexts: list[saved_tensors_hooks | None] = []
        self._outer: list[
            _Hooks | None
        ] = []  # hooks around the running modules, such as those of a recomputation
        self._keep: Callable[[Tensor], Any] = _identity
        self._fetch: Callable[[Any], Tensor] = _identity
        # groups that were gathered ahead of their use, or kept for this pass: they are not released before they are used
        self._ahead: set[int] = set()
        self._unused: set[int] = set()
        self._buckets = list(buckets)
        self._reduced: list[int] = []  # buckets whose reductions were started in this backward pass, in order
        self._order = CallOrder(comm, self._launch, len(groups))
        self.before_reduction: Callable[[int], None] = lambda _: None
        """Called with the index of a bucket before the bucket is reduced."""
        self.without_gradients: Callable[[], None] = lambda: None
        """Called at the end of a backward pass in which no parameter of this rank got a gradient."""
        self._handles = []
        if all(module is not model for module, _ in needs):
            needs = [*needs, (model, [])]  # the end of its call ends the forward pass
        for module, numbers in needs:
            self._handles += [
                module.register_forward_pre_hook(self._before_forward(list(numbers))),
                module.register_forward_hook(self._after_forward(list(numbers)), always_call=True),
            ]
        owners = {module for module, _ in needs}
        for module, numbers in needs:
            for part in _parts(module, owners) if numbers else ():
                before, after = self._around_part(list(numbers))
                self._handles += [
                    part.register_forward_pre_hook(before),
                    part.register_forward_hook(after, always_call=True),
                ]

    # ---- passes ----

    def end_pass(self, kind: Kind) -> None:
        """End a forward or backward pass, even if this rank computed nothing in it.  This is a collective call."""
        if self._whole_contexts:
            return
        if self._order.kind != kind:
            self._order.begin(kind)
            self._reduced.clear()
        if kind == "backward":
            self._order.end(self._left)
        else:
            self._order.end()
        if kind == "backward" or not torch.is_grad_enabled():
            self.release()
        else:  # the backward pass begins with these groups; keep the same number in each pass, for a constant order
            self._release(self._recent[:-_KEPT])
            self._unused = set(self._recent)
            for weights in (weights for group in self._recent for weights in self._groups[group]):
                weights.hide()

    def begin_backward(self) -> None:
        """Begin a backward pass, if it has not begun."""
        self._begin_pass("backward")

    def reduce(self, number: int) -> None:
        """Schedule the reduction of bucket `number`, whose gradients are complete."""
        if self._order.negotiates:
            self._order.request(len(self._groups) + number)
        else:
            self._order.advance(self._is_ready)

    def reduce_early(self, number: int) -> bool:
        """Start to reduce the incomplete bucket `number`, if the order of the pass is being negotiated.

        Returns:
            Whether the reduction has started.
        """
        if not self._order.negotiates:
            return False
        self._order.request(len(self._groups) + number)
        return True

    def forget_order(self) -> None:
        """Make the next backward pass negotiate a new order.

        All ranks must call this method.
        """
        self._order.forget("backward")

    def release(self) -> None:
        """Release the gathered weights of all groups."""
        for group in self._groups:
            for weights in group:
                weights.release()
        self._recent.clear()
        self._ahead.clear()
        self._unused.clear()

    @property
    def is_whole(self) -> bool:
        """Whether all weights are gathered."""
        return all(weights.is_whole for group in self._groups for weights in group)

    def one_by_one(self) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters of one bucket at a time, with unsharded values.  This is a collective call."""
        self.release()
        every = [weights for group in self._groups for weights in group]
        for weights, following in zip(every, [*every[1:], None], strict=True):
            weights.gather_async()
            weights.use()
            if following is not None:
                following.prefetch()
            yield weights.parameters
            weights.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Return a context manager that keeps all weights gathered, so that ranks can compute independently.

        All ranks must enter and exit together.
        """
        self.release()
        for weights in (weights for group in self._groups for weights in group):
            weights.gather_async()
            weights.use()
        self._whole_contexts += 1
        try:
            yield
        finally:
            self._whole_contexts -= 1
            self.release()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self.release()

    def keep_others(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Set the hooks `pack` and `unpack` for saved tensors that are not weights.

        The gatherer calls these hooks, because autograd calls only the innermost hooks.
        """
        self._keep, self._fetch = pack, unpack

    # ---- one group ----

    def _need(self, group: int) -> None:
        """Gather a group, and start gathering the next group."""
        if self._whole_contexts or not self._groups[group]:
            return
        # a forward pass may differentiate a part of itself with `torch.autograd.grad`
        in_forward = torch._C._current_graph_task_id() == -1 or (
            self._depth and self._order.kind == "forward"
        )
        self._begin_pass("forward" if in_forward else "backward")
        if not all(weights.is_gathered for weights in self._groups[group]):
            self._order.request(group)
        for weights in self._groups[group]:
            weights.use()
        self._ahead.discard(group)
        self._unused.discard(group)
        self._touch(group)
        self._order.advance(self._is_ready)
        self._release_old()

    def _is_ready(self, item: int) -> bool:
        """Return whether an item can be launched before it is requested."""
        if item < len(self._groups):
            return not self._ahead and len(self._unused) < CAPACITY - 1  # the current group is gathered too
        return self._buckets[item - len(self._groups)].ready

    def _left(self) -> list[int]:
        """Return the items of buckets that were not reduced in this pass, or received late gradients."""
        return [
            len(self._groups) + number
            for number, bucket in enumerate(self._buckets)
            if number not in self._reduced or bucket.is_late
        ]

    def _begin_pass(self, kind: Kind) -> None:
        if self._order.kind == kind:
            return
        self._order.begin(kind)
        self._ahead.clear()
        self._later = self._needed.copy() if kind == "forward" else Counter()
        self._read_ahead()
        if kind == "backward":
            self._reduced.clear()
            # private, but used by DDP and FSDP: autograd has no public hook at the end of a pass
            Variable._execution_engine.queue_callback(self._passed)

    def _passed(self) -> None:
        """Call `without_gradients` if the gradient reducer has not ended the backward pass."""
        if self._order.kind == "backward":
            self.without_gradients()

    def _launch(self, item: int) -> None:
        if item >= len(self._groups):
            number = item - len(self._groups)
            self.before_reduction(number)
            bucket = self._buckets[number]
            for earlier in (bucket, *bucket.in_the_way()):
                if earlier.in_flight:
                    earlier.wait()
            bucket.reduce_async()
            if bucket.has_two_stages:
                for other in self._reduced:
                    self._buckets[other].advance()
            self._reduced.append(number)
            return
        if not all(weights.is_gathered for weights in self._groups[item]):
            self._ahead.add(item)
        for weights in self._groups[item]:
            weights.prefetch()
        self._read_ahead()
        for weights in self._groups[item]:
            weights.gather_async()
        self._touch(item)
        self._release_old(item)

    def _read_ahead(self) -> None:
        """Start reading the shards for the next gathers."""
        for group in self._order.next_gathers(READ_AHEAD):
            for weights in self._groups[group]:
                weights.prefetch()

    def _touch(self, group: int) -> None:
        if group in self._recent:
            self._recent.remove(group)
        self._recent.append(group)

    def _release_old(self, *kept: int) -> None:
        waiting = self._ahead | self._unused | {group for group in self._recent if self._later[group] > 0}
        idle = [g for g in self._recent[:-1] if not self._users[g] and g not in kept and g not in waiting]
        self._release(idle[: max(0, len(self._recent) - CAPACITY)])

    def _release(self, groups: Sequence[int]) -> None:
        for group in list(groups):
            self._recent.remove(group)
            self._ahead.discard(group)
            self._unused.discard(group)
            for weights in self._groups[group]:
                weights.release()

    # ---- hooks ----

    def _before_forward(self, needs: list[int]) -> Callable[..., None]:
        def before_forward(*_: Any) -> None:
            if not self._depth:
                self._handled = sys.exc_info()[1]  # the model may be called while an exception is handled
            self._depth += 1
            for group in needs:
                self._users[group] += 1
                self._need(group)
            self._contexts.append(self._enter_hooks(_enclosing_hooks()) if needs else None)

        return excluded_from_dynamo(before_forward)

    def _after_forward(self, needs: list[int]) -> Callable[..., None]:
        def after_forward(*_: Any) -> None:
            self._exit_hooks()
            for group in needs:
                self._users[group] -= 1
                self._later[group] -= 1
                if group in self._recent:  # was in use
                    self._touch(group)
            self._depth -= 1
            if self._depth or torch._C._current_graph_task_id() != -1:
                return
            if sys.exc_info()[1] is not self._handled:  # the pass failed
                self._order.abandon()
            else:
                self.end_pass("forward")

        return excluded_from_dynamo(after_forward)

    def _around_part(self, needs: list[int]) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return hooks for a submodule that a checkpoint may recompute without the enclosing module."""
        # The hooks have an effect only if the gatherer's hooks for saved tensors are not active, or are hidden
        # by other hooks, such as those of `torch.utils.checkpoint`.  So the submodule saves the same tensors in
        # its forward pass and in its recomputation.
        gathered: list[list[int]] = []  # the groups that each running call needs

        def before(*_: Any) -> None:
            outer = _enclosing_hooks()
            in_pass = self._depth > 0 or torch._C._current_graph_task_id() != -1
            is_hidden = in_pass and (outer is None or outer[0] != self._pack)
            gathered.append(needs if is_hidden else [])
            for group in gathered[-1]:
                self._users[group] += 1
                self._need(group)
            self._contexts.append(self._enter_hooks(outer) if is_hidden else None)

        def after(*_: Any) -> None:
            self._exit_hooks()
            for group in gathered.pop():
                self._users[group] -= 1

        return excluded_from_dynamo(before), excluded_from_dynamo(after)

    def _enter_hooks(self, outer: _Hooks | None) -> saved_tensors_hooks:
        """Enter the gatherer's hooks for saved tensors, within the hooks `outer`."""
        ours = outer is not None and outer[0] == self._pack  # of an enclosing module
        self._outer.append(self._outer[-1] if ours else outer)
        context = saved_tensors_hooks(self._pack, self._unpack)
        context.__enter__()
        return context

    def _exit_hooks(self) -> None:
        """Exit the hooks that were entered for the innermost running module, if any."""
        context = self._contexts.pop()
        if context is not None:
            context.__exit__(None, None, None)
            self._outer.pop()

    def _pack(self, tensor: Tensor) -> Any:
        for group in self._recent:
            for weights in self._groups[group]:
                if weights.has(tensor):
                    return _SavedPlace(
                        weights, group, tensor.shape, tensor.stride(), int(tensor.storage_offset())
                    )
        outer = self._outer[-1] if self._outer else None
        if outer is not None:
            return _SavedOutside(outer[0](tensor), outer[1])
        return self._keep(tensor)

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _SavedOutside):
            return kept.unpack(kept.kept)
        if not isinstance(kept, _SavedPlace):
            return self._fetch(kept)
        self._need(kept.group)
        return kept.weights.use().as_strided(kept.shape, kept.stride, kept.offset)


def _parts(module: nn.Module, owners: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield submodules that have parameters and do not overlap with an owner (neither contains the other)."""
    for child in module.children():
        if child not in owners:
            if any(True for _ in child.parameters()) and not any(part in owners for part in child.modules()):
                yield child
            yield from _parts(child, owners)


def _identity(tensor: Tensor) -> Tensor:
    return tensor
