"""Compute the activation memory of a rank under a schedule.

A dry run of the complete model gives the bytes that each block saves in one forward pass (`memory.dry_run`).  The
schedule determines how many micro-batches of each stage are in flight on a rank at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from farandole.memory.dry_run import SavedBytes, saved_bytes
from farandole.parallel.pipeline.balance import Balance
from farandole.parallel.pipeline.schedule import Schedule, build
from farandole.parallel.pipeline.simulate import Costs, peak_of
from farandole.parallel.pipeline.stage import blocks_of
from farandole.plan import PlanError

AUTO = "recompute='auto'"


class RankActivations:
    """The blocks of a pipeline rank, and the activations that the rank keeps.

    Args:
        model: the complete model.
        schedule: the pipeline schedule; its number of micro-batches is ignored (see `steady`).
    """

    def __init__(self, model: nn.Sequential, division: Balance, schedule: Schedule, rank: int) -> None:
        names = [name for name, _ in blocks_of(model)]
        self._stages = [[names[place] for place in blocks] for blocks in division.ranges]
        self._schedule, self._rank = schedule, rank
        own = {stage for row in schedule.placement for stage, holder in enumerate(row) if holder == rank}
        self.blocks: Collection[str] = [name for stage in sorted(own) for name in self._stages[stage]]

    def bytes(self, saved: SavedBytes) -> int:
        """Return the peak activation memory of this rank in bytes.

        Args:
            saved: the bytes that one forward pass saves.  Bytes that are saved outside of blocks, such as by the
                loss, belong to the last stage.
        """
        sizes = [float(sum(saved.blocks[name] for name in names)) for names in self._stages]
        sizes[-1] += saved.outside
        return int(peak_of(self._steady, Costs(activation=sizes), self._steady.actions[self._rank]))

    @functools.cached_property
    def _steady(self) -> Schedule:
        return steady(self._schedule, AUTO)


def block_sizes(
    model: nn.Sequential, schedule: Schedule, example: Any, dtype: torch.dtype | None
) -> list[list[float]]:
    """Return, for each stage, the bytes that each block would need there for parameters and activations in flight.

    If a rank has several stages, each stage gets a fraction of the rank's memory, in proportion to the stage's
    micro-batches in flight.  The returned sizes are divided by this fraction.  Therefore a stage fits if its size is
    at most the rank's memory.

    Args:
        model: the complete model.
        example: the input of one micro-batch.
        dtype: the dtype in which the model computes; None for the dtypes of its parameters.
    """
    saved, schedule = saved_bytes(model, example, dtype=dtype), steady(schedule, "stage_bytes")
    sizes = []
    for name, block in blocks_of(model):
        kinds = [
            (p.numel(), dtype if dtype and p.is_floating_point() else p.dtype) for p in block.parameters()
        ]
        sizes.append((sum(count * kind.itemsize for count, kind in kinds), saved.blocks[name]))
    sizes[-1] = (sizes[-1][0], sizes[-1][1] + saved.outside)
    counts = [in_flight(schedule, stage) for stage in range(schedule.stages)]
    found = []
    for stage, count in enumerate(counts):
        ranks = {row[stage] for row in schedule.placement}
        on_rank = [
            [s for row in schedule.placement for s, holder in enumerate(row) if holder == r] for r in ranks
        ]
        parts = max(sum(counts[s] for s in stages) for stages in on_rank) / count
        found.append([parts * (p + count * a) for p, a in sizes])
    return found


def in_flight(schedule: Schedule, stage: int) -> int:
    """Return the maximum number of micro-batches of `stage` whose activations a rank keeps at the same time."""
    alone = Costs(activation=[float(other == stage) for other in range(schedule.stages)])
    return int(max(peak_of(schedule, alone, actions) for actions in schedule.actions))


def steady(schedule: Schedule, asked: str) -> Schedule:
    """Return `schedule` with enough micro-batches that more would not increase the peak memory of any rank.

    Args:
        asked: the name of the option that requires this schedule, for the error message.

    Raises:
        PlanError: if the peak grows with the number of micro-batches.
    """
    few, many = (build(schedule.name, schedule.ranks, factor * schedule.ranks) for factor in (4, 8))
    for before, after in zip(few.actions, many.actions, strict=True):
        if peak_of(few, Costs(), before) != peak_of(many, Costs(), after):
            raise PlanError(
                f"{asked} cannot be used with schedule={schedule.name!r}: the peak memory grows with the number of "
                "micro-batches, which is unknown when the plan is applied; nearest plan: schedule='1f1b'"
            )
    return few
