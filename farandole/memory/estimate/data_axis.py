"""What the data axis makes of a model's parameters: bytes of a rank, and bytes that it communicates.

It follows `parallel.building`: the same buckets, cut into the same shards, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from farandole.memory.blocks import blocks_of
from farandole.memory.estimate.machine import Machine
from farandole.parallel.buckets import Filling, fill, filling_of
from farandole.parallel.engine import BUCKET_BYTES
from farandole.parallel.flat import FlatLayout
from farandole.parallel.gathering import CAPACITY
from farandole.parallel.lender import DEPTH, slot_lengths
from farandole.plan import Plan, PlanError

BUFFERS = 3
"""Records of offloaded states that are in memory at a time (`memory.record_stream.disk_records`)."""


@dataclass(frozen=True)
class Bucket:
    """Parameters that are laid out together: elements with gaps, elements of a shard, bytes of an element.

    `filling` says how it gets its gradients.
    """

    length: int
    shard: int
    itemsize: int
    group: int
    filling: Filling


class DataAxis:
    """The parameters of `model` on each of `ranks` ranks of `machine`.

    `weight_type` is what the plan makes weights of, None as they are.  States are divided among `divided` ranks,
    `copies` times; `shared` says whether those share memory.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, ranks: int, weight_type: torch.dtype | None, machine: Machine
    ) -> None:
        if ranks % machine.hosts:
            raise PlanError(f"{ranks} ranks on {machine.hosts} hosts: a host has equally many as every other")
        self.plan = plan
        self.copies = machine.hosts if plan.hybrid else 1
        self.divided = ranks // self.copies
        self.shared = machine.shared and self.copies == machine.hosts
        self._low = None if weight_type is None else weight_type.itemsize
        self.gathers = plan.zero == 3 and self.divided > 1 and not self.shared
        parameters = list(model.parameters())
        self.sizes = [parameter.nbytes for parameter in parameters]
        self.whole = sum(self.sizes)
        self.trained_sizes = [
            parameter.nbytes for parameter in reversed(parameters) if parameter.requires_grad
        ]
        blocks = _groups(model)
        self._largest_block = max((sum(p.nbytes for p in block) for block in blocks), default=0)
        groups = blocks if self.gathers else [parameters]
        self.trained = self._buckets(groups, trained=True)
        self.frozen = self._buckets(groups, trained=False)

    def weights(self) -> int:
        """What the model computes with, as far as it is in memory."""
        if self.plan.offloaded == "parameters":
            return 0
        found = 0
        for bucket in (*self.trained, *self.frozen):
            size = self._low or bucket.itemsize
            if self.gathers:
                found += bucket.shard * size
            elif self.plan.zero and self.shared:
                found += bucket.length * size // self.divided  # one copy for all
            else:
                found += bucket.length * size
        return found

    def largest_block(self) -> int:
        """As it is made, before the plan makes another type of it."""
        return self._largest_block

    def masters(self) -> int:
        """What the optimizer updates, where that is not the weights themselves."""
        if self._low is None or self.plan.rounding == "stochastic":
            return 0
        return sum(bucket.shard * bucket.itemsize for bucket in self.trained)

    def states(self, count: int) -> int:
        """What the optimizer keeps: `count` numbers for each that it updates."""
        return sum(count * bucket.shard * bucket.itemsize for bucket in self.trained)

    def gradients(self) -> int:
        """From one step to the next, as far as they are in memory."""
        if self.plan.offloaded != "optimizer":
            return 0
        kept = (b.shard if self.plan.zero >= 2 else b.length for b in self.trained)
        return sum(length * b.itemsize for length, b in zip(kept, self.trained, strict=True))

    def lent(self) -> int:
        """What whole gradients pass through with `zero` 2 and 3 (`parallel.lender`), beside those autograd is at."""
        if self.plan.zero < 2 or not self.trained:
            return 0
        sizes: dict[Filling, list[int]] = {"slowly": [], "at once": [], "adopts": []}
        for bucket in self.trained:
            sizes[bucket.filling].append(bucket.length * bucket.itemsize)
        slots = sum(slot_lengths(sizes["slowly"])) + sum(slot_lengths(sizes["at once"]))
        adopted = sizes["adopts"][:-1]  # nothing is computed beside the last one
        return slots + max((sum(adopted[at : at + DEPTH]) for at in range(len(adopted))), default=0)

    def gathered(self) -> int:
        """Weights that are whole for a while (`parallel.gathering`), at most."""
        if not self.gathers:
            return 0
        by_group: dict[int, int] = {}
        for bucket in (*self.trained, *self.frozen):
            nbytes = bucket.length * (self._low or bucket.itemsize)
            by_group[bucket.group] = by_group.get(bucket.group, 0) + nbytes
        return sum(sorted(by_group.values())[-CAPACITY:])

    @property
    def moves(self) -> bool:
        """Whether parameters leave the memory that they were made in."""
        return self.plan.zero > 0 or self._low is not None or self.plan.offload != "none"

    def private(self, *, gradients: bool) -> list[int]:
        """Sizes of what this rank takes from its C library to keep it: for weights, and if asked for gradients."""
        found = [] if self.moves else list(self.sizes)
        for bucket in (*self.trained, *self.frozen):
            size = self._low or bucket.itemsize
            if self.plan.offloaded == "parameters":
                continue
            if self.gathers:
                found.append(bucket.shard * size)
            elif self.moves and not (self.plan.zero and self.shared):
                found.append(bucket.length * size)
        masters = self._low is not None and self.plan.rounding == "nearest" and self.plan.offload == "none"
        gradients = gradients and self.plan.zero >= 2 and self.plan.offloaded == "optimizer"
        for bucket in self.trained:
            found += [bucket.shard * bucket.itemsize] * (masters + gradients)
        return found

    def pieces(self) -> list[int]:
        """Sizes of what the optimizer updates, about: of a parameter that is cut, its mean part."""
        shards = self.divided if self.plan.zero else 1
        return [size // shards for size in self.trained_sizes]

    def records(self, count: int) -> int:
        """What offloaded states need in memory while they pass through."""
        masters = 0 if self._low is None else 1
        sizes = [(count + masters) * bucket.shard * bucket.itemsize for bucket in self.trained]
        return min(BUFFERS, max(2, len(sizes))) * max(sizes, default=0)

    def reduced(self) -> int:
        """Bytes of the gradients that are reduced for one backward pass."""
        return sum(bucket.length * bucket.itemsize for bucket in self.trained)

    def last(self) -> int:
        """Bytes of the bucket that is reduced when nothing is left to compute."""
        return self.trained[-1].length * self.trained[-1].itemsize if self.trained else 0

    def _buckets(self, groups: Sequence[Sequence[nn.Parameter]], *, trained: bool) -> list[Bucket]:
        shards = self.divided if self.plan.zero else 1
        found = []
        for group, members in enumerate(groups):
            wanted = [p for p in members if p.requires_grad == trained]
            if trained:
                wanted.reverse()
            for filled in fill(wanted, 1 << 62 if self.gathers else BUCKET_BYTES):
                layout = FlatLayout([p.shape for p in filled], shards)
                filling = filling_of(layout, same_type=self._low is None)
                found.append(Bucket(layout.length, layout.shard_length, filled[0].itemsize, group, filling))
        return found


def _groups(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each block that has them for itself, and those of none or several; the last group first."""
    blocks = blocks_of(model)
    homes: dict[int, list[int]] = {}
    for number, (_, block) in enumerate(blocks):
        for parameter in block.parameters():
            homes.setdefault(id(parameter), []).append(number)
    groups: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 1)]
    for parameter in model.parameters():
        found = homes.get(id(parameter), [])
        groups[found[0] if len(found) == 1 else len(blocks)].append(parameter)
    return [group for group in reversed(groups) if group]
