"""Divide the blocks of a model into stages, and minimize the maximum stage cost.

    costs = measure_blocks(model, example)                   # seconds and bytes per block
    found = balance([cost.seconds for cost in costs], 4)
    found.ranges, found.imbalance                            # blocks of each stage; excess of the slowest over the mean

The division is optimal.  Dynamic programming over the number of stages and the end of the last stage finds the
division in O(stages x blocks^2).  Huang et al. (2019, "GPipe") and Narayanan et al. (2019, "PipeDream") divide models
in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from farandole.data.wording import size
from farandole.memory.dry_run import call_arguments
from farandole.models.moe import MixtureOfExperts
from farandole.parallel.pipeline.backward import alias
from farandole.parallel.pipeline.schedule import ScheduleError


@dataclass(frozen=True)
class BlockCost:
    """The cost of one block: the time of a forward and a backward pass, and the size of its activations in bytes."""

    name: str
    seconds: float
    activation_bytes: int


@dataclass(frozen=True)
class Balance:
    """A division of blocks into stages.

    Args:
        ranges: the blocks of each stage.
        costs: the cost of each stage.
        sizes: the size of each stage in bytes, if memory was limited.
    """

    ranges: tuple[range, ...]
    costs: tuple[float, ...]
    sizes: tuple[float, ...] = ()

    @property
    def imbalance(self) -> float:
        """The highest stage cost divided by the mean stage cost, minus 1."""
        mean = sum(self.costs) / len(self.costs)
        return max(self.costs) / mean - 1 if mean else 0.0

    def __str__(self) -> str:
        total = sum(self.costs) or 1.0
        stages = ", ".join(
            f"{blocks.start}-{blocks.stop - 1} ({100 * cost / total:.0f} %)"
            for blocks, cost in zip(self.ranges, self.costs, strict=True)
        )
        limited = (
            f"; at most {size(max(self.sizes))} of parameters and activations on a rank" if self.sizes else ""
        )
        return f"blocks of the stages: {stages}; the slowest stage exceeds the mean by {100 * self.imbalance:.0f} %{limited}"


def balance(
    costs: Sequence[float],
    stages: int,
    *,
    sizes: Sequence[Sequence[float]] | None = None,
    memory: float | None = None,
) -> Balance:
    """Divide blocks into non-empty stages of consecutive blocks, and minimize the maximum stage cost.

    Args:
        costs: the cost of each block.
        sizes: `sizes[stage][block]` is the size that `block` would have in `stage`, in the unit of `memory`.
        memory: the maximum size of a stage.

    Raises:
        ScheduleError: if there are fewer blocks than stages, or if no division fits in `memory`.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise ScheduleError(
            f"{blocks} blocks cannot be divided into {stages} stages; nearest: {max(1, blocks)} stages"
        )
    total, infinite = [0.0, *accumulate(costs)], float("inf")
    held_before = [[0.0, *accumulate(row)] for row in sizes or [[0.0] * blocks] * stages]

    def cost(stage: int, start: int, end: int) -> float:
        fits = memory is None or held_before[stage][end] - held_before[stage][start] <= memory
        return total[end] - total[start] if fits else infinite

    # best[end] is the smallest maximum cost of the stages so far, if they contain the blocks before `end`
    best = [cost(0, 0, end) if end else infinite for end in range(blocks + 1)]
    starts: list[list[int]] = []
    for stage in range(1, stages):
        choices = [
            min(
                ((max(best[start], cost(stage, start, end)), start) for start in range(end)),
                default=(infinite, 0),
            )
            for end in range(blocks + 1)
        ]
        best = [value for value, _ in choices]
        starts.append([start for _, start in choices])
    if best[blocks] == infinite:
        least = _least_memory(held_before, blocks)
        raise ScheduleError(
            f"the blocks cannot be divided into {stages} stages of size at most {memory:g} each; raise the limit to at "
            f"least {least:g}, or use more stages"
        )
    ends = [blocks]
    for row in reversed(starts):
        ends.append(row[ends[-1]])
    bounds = [0, *reversed(ends)]
    ranges = tuple(range(start, end) for start, end in zip(bounds, bounds[1:], strict=False))
    held = tuple(row[each.stop] - row[each.start] for row, each in zip(held_before, ranges, strict=True))
    return Balance(
        ranges, tuple(total[each.stop] - total[each.start] for each in ranges), held if sizes else ()
    )


def _least_memory(size: Sequence[Sequence[float]], blocks: int) -> float:
    """Return the smallest memory limit for which a division exists, given prefix sums of block sizes."""
    infinite = float("inf")
    best = [size[0][end] if end else infinite for end in range(blocks + 1)]
    for row in size[1:]:
        best = [
            min((max(best[start], row[end] - row[start]) for start in range(end)), default=infinite)
            for end in range(blocks + 1)
        ]
    return best[blocks]


def measure_blocks(model: nn.Sequential, example: Any, repeats: int = 3) -> list[BlockCost]:
    """Measure the time and the activation memory of each block of `model` on one micro-batch.

    The measurement does not change gradients, buffers or the states of random number generators.

    Args:
        example: the input of the model; see `call_arguments`.
        repeats: the number of measurements of each block; the shortest time is used.
    """
    arguments, named = call_arguments(example)
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def remember(block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls[block] = (given, named)

    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    handles = [block.register_forward_pre_hook(remember, with_kwargs=True) for block in model]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices):
        try:
            with torch.no_grad():
                model(*arguments, **named)
        finally:
            for handle in handles:
                handle.remove()
        blocks = [(name, block) for name, block in model._modules.items() if block is not None]
        costs = [_measure(name, block, *calls[block], repeats) for name, block in blocks]
    for buffer, before in buffers:
        buffer.copy_(before)
    return costs


def _measure(
    name: str, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any], repeats: int
) -> BlockCost:
    parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
    inputs = tuple(_leaf(value) for value in given)
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    seconds, kept = [], 0
    for _ in range(repeats):
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        started = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = block(*tree_map_only(Tensor, alias, inputs), **named)
        outputs = [each for each in tensors_of(output) if each.requires_grad]
        wanted = [*parameters, *(each for each in tensors_of(inputs) if each.requires_grad)]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs], allow_unused=True)
        if outputs and outputs[0].is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        kept = sum(saved.values())
    return BlockCost(name, min(seconds), kept)


def parameter_costs(model: nn.Sequential) -> list[float]:
    """Estimate the relative time of each block from the number of parameters that a token uses.

    Embedding tables, and experts that a token does not use, are not counted.
    """
    costs = []
    for block in model:
        shares = {id(m.weight): 0.0 for m in block.modules() if isinstance(m, nn.Embedding)}
        for module in block.modules():
            if isinstance(
                module, MixtureOfExperts
            ):  # a rank may have only some of the experts, but process tokens of other ranks
                shares |= {id(p): module.router.top / len(p) for p in module.experts.parameters()}
        costs.append(float(sum(p.numel() * shares.get(id(p), 1.0) for p in block.parameters())))
    return costs


def tensors_of(value: Any) -> list[Tensor]:
    """Return the distinct tensors in `value`, including tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, tuple | list) else ()
    return list({id(each): each for part in parts for each in tensors_of(part)}.values())


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    return type(value)(map(_leaf, value)) if type(value) in (tuple, list) else value
