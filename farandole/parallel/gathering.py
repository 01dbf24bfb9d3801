"""Weights that ranks have a shard of each, and whole only while a block computes (`zero=3`).

Where ranks share memory there is nothing to gather (`weights`).  Elsewhere a block's weights are gathered before
its forward pass and again for its backward pass, those of the block that comes next while this one computes, and
forgotten soon after.

Autograd keeps weights for the backward pass.  It would keep the gathered memory alive, so what it is given to keep
is a note of where in the weights a tensor lies (`torch.autograd.graph.saved_tensors_hooks`); when the backward pass
asks for it, that is where it is cut out again, from weights that are gathered then if they were forgotten.  So the
backward pass needs no further hooks, and gathers in the order in which it needs.

All ranks gather the same in the same order, as they all compute the same blocks; a rank that computes others makes a
call that differs, which is named as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from farandole.comm.communicator import Communicator
from farandole.comm.dynamo import excluded_from_dynamo
from farandole.memory.mmap_allocator import MmapAllocator
from farandole.memory.tracker import memory_tag
from farandole.parallel.flat import FlatLayout
from farandole.parallel.weights import (
    Masters,
    are_apart,
    copy_of_own,
    fill_own,
    first_master,
    gather_shards,
    is_same_memory,
)

CAPACITY = 3
"""Groups of weights that are whole at a time: of the block that computes, the one before and the one to come."""


class GatheredWeights:
    """The weights of some parameters of one type, of which this rank keeps shard `own`, as type `dtype`, in `room` if given.

    While they are not gathered the parameters have their shapes, read as NaN, and take no memory.
    """

    common = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        own: int,
        comm: Communicator,
        dtype: torch.dtype,
        *,
        trained: bool,
        masters: Masters = "beside",
        room: MmapAllocator | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._layout, self._comm, self._shard = layout, comm, own
        first = parameters[0]
        self.masters_apart = trained and are_apart(masters, first, dtype)
        with torch.no_grad():
            with memory_tag("masters and states" if self.masters_apart else "weights", parameters):
                shard = copy_of_own(parameters, layout, own)
            with memory_tag("weights", parameters):
                self.own = shard if dtype == shard.dtype else shard.to(dtype)
            if room is not None:
                self.own = room.own(layout.shard_length, dtype).copy_(shard)
            self.master = first_master(masters, shard, self.own) if trained else None
            nothing = torch.full((), torch.nan, dtype=dtype, device=first.device)
        self._placeholders = [nothing.expand(parameter.shape) for parameter in parameters]
        self._whole: Tensor | None = None
        self._work: dist.Work | None = None
        self._set(self._placeholders)

    def start(self) -> None:
        """Begin to gather them, if they are not whole."""
        if self._whole is None:
            with memory_tag("weights", self.parameters):
                self._whole = self.own.new_empty(self._layout.length)
            self._work = self._comm.all_gather(self._whole, self.own, async_op=True)

    def use(self) -> Tensor:
        """The whole buffer; the parameters are views of it from now on."""
        self.start()
        assert self._whole is not None
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._set(self._layout.views(self._whole))
        return self._whole

    @property
    def is_whole(self) -> bool:
        """Whether the parameters have their values."""
        return self._whole is not None and self._work is None

    def forget(self) -> None:
        """Keep this rank's shard only."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._whole is not None:
            self._whole = None
            self._set(self._placeholders)

    def place_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the gathered memory."""
        whole = self._whole
        return whole is not None and whole.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()

    def show_weights(self) -> None:
        """The parameters are not gathered."""
        self._whole = None
        self._set(self._placeholders)

    def show_masters(self) -> None:
        """The parameters are copies of the masters, whole.  All ranks call it."""
        self.forget()
        own = self.own if self.master is None or not self.masters_apart else self.master
        whole = own.new_empty(self._layout.length)
        gather_shards(self._comm, whole, own)
        self._set(self._layout.views(whole))

    def holds(self, index: int) -> bool:
        """Whether parameter `index` is where it should be, while nothing is gathered."""
        return self._whole is not None or is_same_memory(self.parameters[index], self._placeholders[index])

    def fill(self, index: int, values: Tensor) -> None:
        """Begin with other `values` of parameter `index`, shaped as it is; all ranks call it, with the same ones."""
        fill_own(self.own, self._layout, self._shard, index, values)
        if self.masters_apart and self.master is not None:
            fill_own(self.master, self._layout, self._shard, index, values)

    def shard_parts(self) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
        """(parameter, values, start): what this rank's shard has of each parameter, flat."""
        for piece in self._layout.pieces(self._shard):
            yield (
                self.parameters[piece.index],
                self.own[piece.offset : piece.offset + piece.length],
                piece.start,
            )

    def take(self, offset: int, values: Tensor) -> None:
        """Compute with new `values` of this rank's shard, from its element `offset` on."""
        self.own[offset : offset + values.numel()].copy_(values)

    def publish(self) -> None:
        """Take over what the optimizer has made of this rank's shard; what was gathered before is out of date."""
        self.forget()
        if self.master is not None and self.masters_apart:
            self.own.copy_(self.master)

    def _set(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor


@dataclass(frozen=True)
class _Note:
    """Where a tensor that autograd keeps lies in the weights of a group."""

    weights: GatheredWeights
    group: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Gathering:
    """Gathers groups of weights when blocks compute, and forgets them after.

    `groups[n]` are the weights that are gathered together; `blocks` names the groups that each module needs.
    """

    def __init__(
        self, groups: Sequence[Sequence[GatheredWeights]], blocks: Sequence[tuple[nn.Module, Sequence[int]]]
    ) -> None:
        self._groups = [list(group) for group in groups]
        self._recent: list[int] = []  # groups that are whole or on their way, the latest last
        self._pinned = [0] * len(groups)  # how many modules under way need each
        self._contexts: list[saved_tensors_hooks] = []
        self._keep: Callable[[Tensor], Any] = _as_it_is
        self._fetch: Callable[[Any], Tensor] = _as_it_is
        self._last: tuple[int | None, int | None] = (None, None)  # the two groups that were needed last
        self._after: dict[
            tuple[int | None, int | None], int
        ] = {}  # which one came after such two, the last time
        self._handles = []
        for module, needs in blocks:
            self._handles += [
                module.register_forward_pre_hook(self._begin(list(needs))),
                module.register_forward_hook(self._end(list(needs)), always_call=True),
            ]

    def need(self, group: int) -> None:
        """Have a group whole, and begin with the one that came after it the last time."""
        for weights in self._groups[group]:
            weights.use()
        if group != self._last[1]:
            self._after[self._last] = group
            self._last = (self._last[1], group)
        following = self._after.get(self._last)
        if following is not None and following not in self._recent:
            for weights in self._groups[following]:
                weights.start()
            self._recent.append(following)
        if group in self._recent:
            self._recent.remove(group)
        self._recent.append(group)
        idle = [other for other in self._recent[:-1] if not self._pinned[other]]
        for other in idle[: max(0, len(self._recent) - CAPACITY)]:
            self._recent.remove(other)
            for weights in self._groups[other]:
                weights.forget()

    @property
    def is_whole(self) -> bool:
        """Whether all weights are whole at the moment."""
        return all(weights.is_whole for group in self._groups for weights in group)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All weights are whole within it, so that a rank may compute with the model by itself."""
        for group in range(len(self._groups)):
            self._pinned[group] += 1
            self.need(group)
        try:
            yield
        finally:
            for group in range(len(self._groups)):
                self._pinned[group] -= 1
            self.forget()

    def forget(self) -> None:
        """Forget all groups: a pass has ended, or the weights have changed."""
        for group in self._groups:
            for weights in group:
                weights.forget()
        self._recent.clear()
        self._last = (None, None)

    def close(self) -> None:
        """Let go of the modules."""
        for handle in self._handles:
            handle.remove()
        self.forget()

    def _begin(self, needs: list[int]) -> Callable[..., None]:
        def before_forward(*_: Any) -> None:
            for group in needs:
                self._pinned[group] += 1
                self.need(group)
            context = saved_tensors_hooks(self._pack, self._unpack)
            context.__enter__()
            self._contexts.append(context)

        return excluded_from_dynamo(before_forward)

    def _end(self, needs: list[int]) -> Callable[..., None]:
        def after_forward(*_: Any) -> None:
            self._contexts.pop().__exit__(None, None, None)
            for group in needs:
                self._pinned[group] -= 1

        return excluded_from_dynamo(after_forward)

    def keep_others(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Have what is no weight kept by these hooks: of nested ones autograd calls the innermost only, which are here."""
        self._keep, self._fetch = pack, unpack

    def _pack(self, tensor: Tensor) -> Any:
        for group in self._recent:
            for weights in self._groups[group]:
                if weights.place_of(tensor):
                    return _Note(weights, group, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return self._keep(tensor)

    def _unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Note):
            return self._fetch(kept)
        self.need(kept.group)
        return kept.weights.use().as_strided(kept.shape, kept.stride, kept.offset)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
