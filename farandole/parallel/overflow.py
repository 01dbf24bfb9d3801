"""Find the ranks, parameters and blocks with infinities or NaNs.

Averaging spreads one rank's infinity to all ranks.  Therefore each rank checks its own gradients just before a bucket
is reduced, while the gradients are in the cache.  Ranks exchange their findings only after a step with an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from farandole.comm.communicator import Communicator
from farandole.memory.blocks import blocks_of
from farandole.parallel.optimizers.shards import OptimizerShards

KINDS = ("finite", "inf", "nan")
"""The kinds of tensors, in order of severity; ranks exchange indices into this tuple."""


def kind_of(tensor: Tensor) -> int:
    """Return the index in `KINDS` of the worst element of `tensor`: 0 for finite, 1 for infinite, 2 for NaN."""
    if bool(tensor.isfinite().all()):
        return 0
    return 2 if bool(tensor.isnan().any()) else 1


@dataclass(frozen=True)
class OverflowReport:
    """A report about non-finite gradients, identical on all ranks.

    Args:
        kind: "inf" or "nan".
        rank: the first rank whose gradient of `parameter` was not finite; None if only the averaged gradient was not
            finite.
        parameter: the first parameter with a non-finite gradient, in model order; None if only the norm was not finite.
        more_parameters: the number of other parameters with non-finite gradients, on any rank.
        other_ranks: the other ranks with non-finite gradients.
        output: a description of the first non-finite output of a block, if outputs were checked.
    """

    kind: str
    rank: int | None = None
    parameter: str | None = None
    more_parameters: int = 0
    other_ranks: tuple[int, ...] = ()
    output: str = ""

    def __str__(self) -> str:
        if self.parameter is None:
            return f"gradient norm {self.kind}"
        place = "average over ranks" if self.rank is None else f"rank {self.rank}"
        further = []
        if self.more_parameters:
            further.append(f"and {self.more_parameters} more parameter{'s' * (self.more_parameters > 1)}")
        if self.other_ranks:
            further.append(f"also on {_ranks(self.other_ranks)}")
        return f"{place}, {self.parameter} grad {self.kind}" + (f" ({', '.join(further)})" if further else "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} other ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class GradientWatch:
    """Records in each step which gradients of this rank are not finite before averaging.

    Args:
        names: the names of all parameters on the mesh, in the same order on all ranks.
    """

    def __init__(self, names: Iterable[str], shards: Sequence[OptimizerShards]) -> None:
        self.names = list(names)
        places = {name: place for place, name in enumerate(self.names)}
        self._places = [[places[name] for name in each.bucket.plan.names] for each in shards]
        self._shards = shards
        self._kinds: dict[int, int] = {}
        self._norms: list[tuple[list[int], Tensor]] = []

    def clear(self) -> None:
        """Discard the findings of the previous step."""
        self._kinds.clear()
        self._norms.clear()

    def check(self, number: int) -> None:
        """Check this rank's gradients in bucket `number`, which must be complete and not yet averaged."""
        whole, received = self._shards[number].bucket.own_gradients()
        views = {index: view for index, view in received.items() if view.numel()}
        if not views:
            return
        if whole.device.type != "cpu":  # waiting for the result would delay the backward pass
            norms = torch.stack(torch._foreach_norm(list(views.values()), math.inf))
            self._norms.append(([self._places[number][index] for index in views], norms))
        elif not math.isfinite(torch.linalg.vector_norm(whole, dtype=torch.float32)):
            for index, view in views.items():
                self._note(self._places[number][index], kind_of(view))

    def locate(self, comm: Communicator, outputs: OutputWatch | None = None) -> OverflowReport:
        """Return the report of this step, which is the same on all ranks.  This is a collective call."""
        block, output = (-2, 0) if outputs is None else outputs.found()
        kinds = torch.tensor([*self._kinds_here(), *self._kinds_averaged(), block, output], dtype=torch.int32)
        seen = torch.empty(comm.size * len(kinds), dtype=torch.int32)
        comm.all_gather(seen, kinds)
        table = seen.view(comm.size, -1)
        count = len(self.names)
        by_rank = bool(table[:, :count].any())
        found = _blame(table[:, :count] if by_rank else table[:, count:-2], self.names, by_rank)
        if outputs is None:
            return found
        return replace(found, output=outputs.describe(table[:, -2:].tolist(), found.rank))

    def _kinds_here(self) -> list[int]:
        """Return the kind of each parameter's gradient on this rank before averaging, in model order."""
        for places, norms in self._norms:
            for place, norm in zip(places, norms.cpu(), strict=True):
                self._note(place, kind_of(norm))
        self._norms.clear()
        return [self._kinds.get(place, 0) for place in range(len(self.names))]

    def _kinds_averaged(self) -> list[int]:
        """Return the kinds of the averaged gradients in this rank's shards."""
        kinds = [0] * len(self.names)
        for places, shards in zip(self._places, self._shards, strict=True):
            for index, gradient in shards.set():
                kinds[places[index]] = kind_of(gradient)
        return kinds

    def _note(self, place: int, kind: int) -> None:
        if kind > self._kinds.get(place, 0):
            self._kinds[place] = kind


class OutputWatch:
    """Records the first block of `model` with a non-finite output, while checks are enabled."""

    def __init__(self, model: nn.Module) -> None:
        self._blocks = blocks_of(model)
        self._handles: list[RemovableHandle] = []
        self._first: tuple[int, int] | None = None

    @property
    def armed(self) -> bool:
        """Whether outputs are checked."""
        return bool(self._handles)

    def arm(self) -> None:
        """Start checking the output of every block for infinities and NaNs."""
        self._first = None
        if not self._handles:
            self._handles = [
                block.register_forward_hook(self._hook(number))
                for number, (_, block) in enumerate(self._blocks)
            ]

    def disarm(self) -> None:
        """Stop checking."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def found(self) -> tuple[int, int]:
        """Return (block, kind) of the first non-finite output.

        The block is -1 if all outputs were finite, and -2 if no output was checked.
        """
        return self._first or (-1 if self.armed else -2, 0)

    def describe(self, found: Sequence[Sequence[int]], rank: int | None) -> str:
        """Describe the first non-finite output on `rank`, or else on the first rank with such an output."""
        bad = {r: (block, kind) for r, (block, kind) in enumerate(found) if block >= 0}
        if not bad:
            checked = any(block == -1 for block, _ in found)
            return "the outputs of all blocks were finite" if checked else ""
        where = rank if rank in bad else min(bad)
        block, kind = bad[where]
        place = "" if where == rank else f" on rank {where}"
        return f"first bad output: {self._blocks[block][0] or 'the model'} ({KINDS[kind]}){place}"

    def _hook(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def computed(module: nn.Module, _: Any, output: Any) -> None:
            # evaluations between steps are not checked
            if self._first is not None or not (module.training or torch.is_grad_enabled()):
                return
            kind = max((kind_of(tensor.detach()) for tensor in _floating(output)), default=0)
            if kind:
                self._first = number, kind

        return computed


def _floating(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _floating(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floating(item)


def _blame(table: Tensor, names: Sequence[str], by_rank: bool) -> OverflowReport:
    """Return a report on the first parameter with a non-finite gradient in `table` (ranks, parameters)."""
    bad = table.amax(0).nonzero().flatten().tolist()
    if not bad:
        return OverflowReport("inf")  # only the sum of squares overflowed
    column = table[:, bad[0]]
    rank = int(column.nonzero()[0])
    kind = KINDS[int(column[rank])]
    if not by_rank:
        return OverflowReport(kind, None, names[bad[0]], len(bad) - 1)
    others = [other for other in table.amax(1).nonzero().flatten().tolist() if other != rank]
    return OverflowReport(kind, rank, names[bad[0]], len(bad) - 1, tuple(others))
