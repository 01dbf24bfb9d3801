"""What the data axis makes of a model's parameters: bytes of a rank, and bytes that it communicates.

The buckets and shards are those of the engine (`parallel.sharding`), to the byte.
"""

from __future__ import annotations

import torch
from torch import nn

from farandole.memory.blocks import blocks_of
from farandole.memory.estimate.machine import Machine
from farandole.parallel.bucket import DEPTH, buffer_lengths
from farandole.parallel.gathered_weights import CAPACITY
from farandole.parallel.sharding import Filling, data_mesh, plan_sharding, replicated_layouts
from farandole.plan import Plan, PlanError

BUFFERS = 3
"""Records of offloaded states that are in memory at a time (`memory.record_stream.disk_records`)."""


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
        self._largest_block = max(
            (sum(p.nbytes for p in block.parameters()) for _, block in blocks_of(model)), default=0
        )
        hosts = [rank * machine.hosts // ranks for rank in range(ranks)] if plan.hybrid else None
        sharding = plan_sharding(
            model,
            data_mesh(ranks, hosts),
            replicated_layouts(model),
            0,
            zero=plan.zero,
            dtype=weight_type,
            flat=plan.zero > 0 or weight_type is not None or plan.offload != "none",
            gathered=self.gathers,
        )
        self.trained, self.frozen = sharding.trained, sharding.frozen
        if not sharding.flat:  # frozen parameters stay where they are
            self._unmoved = sum(p.nbytes for p in parameters if not p.requires_grad)
        else:
            self._unmoved = 0

    def weights(self) -> int:
        """What the model computes with, as far as it is in memory."""
        if self.plan.offloaded == "parameters":
            return 0
        found = self._unmoved
        for bucket in (*self.trained, *self.frozen):
            if self.gathers:
                found += bucket.layout.shard_length * bucket.dtype.itemsize
            elif self.plan.zero and self.shared:
                found += bucket.layout.length * bucket.dtype.itemsize // self.divided  # one copy for all
            else:
                found += bucket.layout.length * bucket.dtype.itemsize
        return found

    def largest_block(self) -> int:
        """As it is made, before the plan makes another type of it."""
        return self._largest_block

    def masters(self) -> int:
        """What the optimizer updates, where that is not the weights themselves."""
        if self._low is None or self.plan.rounding == "stochastic":
            return 0
        return sum(bucket.layout.shard_length * bucket.master_dtype.itemsize for bucket in self.trained)

    def states(self, count: int) -> int:
        """What the optimizer keeps: `count` numbers for each that it updates."""
        return sum(
            count * bucket.layout.shard_length * bucket.master_dtype.itemsize for bucket in self.trained
        )

    def gradients(self) -> int:
        """From one step to the next, as far as they are in memory."""
        if self.plan.offloaded != "optimizer":
            return 0
        kept = (b.layout.shard_length if self.plan.zero >= 2 else b.layout.length for b in self.trained)
        return sum(length * b.master_dtype.itemsize for length, b in zip(kept, self.trained, strict=True))

    def lent(self) -> int:
        """What whole gradients pass through with `zero` 2 and 3 (`parallel.bucket`), beside those autograd is at."""
        if self.plan.zero < 2 or not self.trained:
            return 0
        sizes: dict[Filling, list[int]] = {"copied": [], "copied at once": [], "zero-copy": []}
        for bucket in self.trained:
            sizes[bucket.filling].append(bucket.layout.length * bucket.master_dtype.itemsize)
        buffers = sum(buffer_lengths(sizes["copied"])) + sum(buffer_lengths(sizes["copied at once"]))
        used = sizes["zero-copy"][:-1]  # nothing is computed beside the last one
        return buffers + max((sum(used[at : at + DEPTH]) for at in range(len(used))), default=0)

    def gathered(self) -> int:
        """Weights that are whole for a while (`parallel.gathered_weights`), at most."""
        if not self.gathers:
            return 0
        by_group: dict[int, int] = {}
        for bucket in (*self.trained, *self.frozen):
            nbytes = bucket.layout.length * bucket.dtype.itemsize
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
            size = bucket.dtype.itemsize
            if self.plan.offloaded == "parameters":
                continue
            if self.gathers:
                found.append(bucket.layout.shard_length * size)
            elif self.moves and not (self.plan.zero and self.shared):
                found.append(bucket.layout.length * size)
        masters = self._low is not None and self.plan.rounding == "nearest" and self.plan.offload == "none"
        gradients = gradients and self.plan.zero >= 2 and self.plan.offloaded == "optimizer"
        for bucket in self.trained:
            found += [bucket.layout.shard_length * bucket.master_dtype.itemsize] * (masters + gradients)
        return found

    def pieces(self) -> list[int]:
        """Sizes of what the optimizer updates, about: of a parameter that is cut, its mean part."""
        shards = self.divided if self.plan.zero else 1
        return [size // shards for size in self.trained_sizes]

    def records(self, count: int) -> int:
        """What offloaded states need in memory while they pass through."""
        masters = 0 if self._low is None else 1
        sizes = [
            (count + masters) * bucket.layout.shard_length * bucket.master_dtype.itemsize
            for bucket in self.trained
        ]
        return min(BUFFERS, max(2, len(sizes))) * max(sizes, default=0)

    def reduced(self) -> int:
        """Bytes of the gradients that are reduced for one backward pass."""
        return sum(bucket.layout.length * bucket.master_dtype.itemsize for bucket in self.trained)

    def last(self) -> int:
        """Bytes of the bucket that is reduced when nothing is left to compute."""
        return self.trained[-1].layout.length * self.trained[-1].master_dtype.itemsize if self.trained else 0
