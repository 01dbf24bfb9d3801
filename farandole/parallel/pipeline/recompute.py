"""The activations that a rank keeps under a schedule, to choose what its stages recompute.

A dry run of the complete model gives the bytes that each block saves in one forward pass (`memory.dry_run`).  The schedule
determines how many micro-batches of each stage are in flight on a rank at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from torch import nn

from farandole.memory.dry_run import SavedBytes
from farandole.parallel.pipeline.balance import Balance
from farandole.parallel.pipeline.schedule import Schedule, build
from farandole.parallel.pipeline.simulate import Costs, peak_of
from farandole.parallel.pipeline.stage import blocks_of
from farandole.plan import PlanError


class RankActivations:
    """The blocks of a pipeline rank, and the activations that the rank keeps.

    Args:
        model: the complete model.
        schedule: the schedule for any number of micro-batches.
    """

    def __init__(self, model: nn.Sequential, division: Balance, schedule: Schedule, rank: int) -> None:
        names = [name for name, _ in blocks_of(model)]
        self._stages = [[names[place] for place in blocks] for blocks in division.ranges]
        self._schedule, self._rank = schedule, rank
        own = {stage for row in schedule.placement for stage, holder in enumerate(row) if holder == rank}
        self.blocks: Collection[str] = [name for stage in sorted(own) for name in self._stages[stage]]

    def bytes(self, saved: SavedBytes) -> int:
        """Return the peak of this rank's activations in a step, given the bytes that one forward pass saves.

        Bytes that are saved outside of blocks, such as those of the loss, belong to the last stage.
        """
        sizes = [float(sum(saved.blocks[name] for name in names)) for names in self._stages]
        sizes[-1] += saved.outside
        return int(peak_of(self._steady, Costs(activation=sizes), self._steady.actions[self._rank]))

    @functools.cached_property
    def _steady(self) -> Schedule:
        return steady(self._schedule)


def steady(schedule: Schedule) -> Schedule:
    """Return a schedule for so many micro-batches that more of them do not increase the peak of any rank.

    Raises:
        PlanError: if the peak is proportional to the number of micro-batches.
    """
    few, many = (build(schedule.name, schedule.ranks, factor * schedule.ranks) for factor in (4, 8))
    for before, after in zip(few.actions, many.actions, strict=True):
        if peak_of(few, Costs(), before) != peak_of(many, Costs(), after):
            raise PlanError(
                f"schedule={schedule.name!r} with recompute='auto': a rank keeps the activations of all micro-batches, whose "
                "number is not part of a plan; nearest plan: schedule='1f1b', or recompute='block'"
            )
    return few
