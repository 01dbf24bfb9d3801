"""Search for the fastest schedule for given costs and memory, and compare it with the registered schedules.

    found = search(ranks=4, micro_batches=16, costs=Costs(1, 2, 1), memory=3)
    found.best.makespan, found.bound

The search tries list scheduling with several placements and priority rules, and the registered schedules that fit.  The
best result is then improved by local search: move one action within a rank, and keep the change if the schedule is not
slower.  No schedule with these placements can be faster than `bound`, so `bound` limits the distance of the result
from the optimum.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from farandole.parallel.pipeline.list_scheduling import Key, delay_weights, list_schedule
from farandole.parallel.pipeline.schedule import (
    Action,
    BackwardWeight,
    Forward,
    Placement,
    Schedule,
    ScheduleError,
    build,
    linear,
    mirror,
    registered,
    v_shape,
)
from farandole.parallel.pipeline.simulate import Costs, Timeline, simulate


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Args:
        best: the fastest schedule that fits.
        bound: a lower bound on the makespan of any schedule with the placements that the search tries.
        named: the timelines, by name, of the registered schedules that support the given numbers of ranks and
            micro-batches.
    """

    best: Timeline
    bound: float
    named: dict[str, Timeline]


def search(
    ranks: int,
    micro_batches: int,
    costs: Costs | None = None,
    memory: float = math.inf,
    *,
    mirrored: bool = True,
    tries: int = 400,
) -> Found:
    """Search for the fastest schedule that fits in `memory`.

    Args:
        memory: the limit on the activation memory of each rank, in the unit of `costs.activation`.
        mirrored: whether schedules with two replicas of the weights are allowed.
        tries: the number of steps of the local search.

    Raises:
        ScheduleError: if no schedule fits; the message contains the smallest `memory` in which a registered schedule
            fits.
    """
    costs = costs or Costs()
    named = dict(_named(ranks, micro_batches, costs))
    candidates = [timeline for timeline in named.values() if mirrored or not timeline.schedule.mirrored]
    least = min((timeline.peak for timeline in candidates), default=math.inf)
    for schedule in _candidates(ranks, micro_batches, costs, memory, mirrored=mirrored):
        candidates.append(simulate(schedule, costs))
    fitting = [timeline for timeline in candidates if timeline.peak <= memory + 1e-9]
    if not fitting:
        raise ScheduleError(
            f"no schedule for {ranks} ranks and {micro_batches} micro-batches fits in memory={memory:g}; the known "
            f"schedules need memory={least:g} or more"
        )
    best = _improve(min(fitting, key=_quality), costs, memory, tries)
    bound = min(_bound(placement, micro_batches, costs) for placement in _placements(ranks, costs, mirrored))
    return Found(best, bound, named)


def _quality(timeline: Timeline) -> tuple[float, float, float]:
    return timeline.makespan, timeline.schedule.mirrored, timeline.peak


def _named(ranks: int, micro_batches: int, costs: Costs) -> Iterator[tuple[str, Timeline]]:
    for each in registered():
        try:
            yield each.name, simulate(build(each.name, ranks, micro_batches), costs)
        except ScheduleError:  # needs another number of ranks, or `costs` lists of another length
            continue


# ---- candidates ----


def _placements(ranks: int, costs: Costs, mirrored: bool) -> list[Placement]:
    """Return the placements to try; costs that are given per stage determine the number of stages."""
    found = [linear(ranks), v_shape(ranks), linear(ranks, 2), *([mirror(ranks)] if mirrored else [])]
    given = {
        len(value)
        for value in (costs.forward, costs.input, costs.weight, costs.activation, costs.waiting)
        if isinstance(value, Sequence)
    }
    return [placement for placement in found if not given or given == {len(placement[0])}]


def _rules() -> Iterator[tuple[str, Key]]:
    for name, forward, weight in (
        ("backward first", 1, 2),
        ("forward first", 0, 2),
        ("weights before forward", 2, 1),
    ):

        def kind(action: Action, forward: int = forward, weight: int = weight) -> float:
            if isinstance(action, Forward):
                return forward
            return weight if isinstance(action, BackwardWeight) else 0.5

        yield f"{name}, oldest micro-batch", lambda a, kind=kind: (kind(a), a.micro_batch, -a.stage)  # type: ignore[misc]
        yield f"{name}, last stage", lambda a, kind=kind: (kind(a), -a.stage, a.micro_batch)  # type: ignore[misc]


def _candidates(
    ranks: int, micro_batches: int, costs: Costs, memory: float, *, mirrored: bool
) -> Iterator[Schedule]:
    for placement in _placements(ranks, costs, mirrored):
        replicas = [m % len(placement) for m in range(micro_batches)]
        for rule, key in _rules():
            for split in (False, True):
                schedule = list_schedule(
                    rule, placement, replicas, key, costs=costs, memory=memory, split=split
                )
                if schedule is not None:
                    yield delay_weights(schedule, costs) if split else schedule


def _bound(placement: Placement, micro_batches: int, costs: Costs) -> float:
    """Return a lower bound on the makespan."""
    numbers = tuple(m % len(placement) for m in range(micro_batches))
    ranks = max(placement[0]) + 1
    schedule = Schedule("", ((),) * ranks, placement, numbers)
    total = [
        sum(costs.at(part, schedule, stage) for part in ("forward", "input", "weight"))
        + (costs.at("forward", schedule, stage) if costs.recompute else 0.0)
        for stage in range(schedule.stages)
    ]
    bounds = [micro_batches * sum(total) / ranks]
    for rank in range(ranks):
        heads = []
        for row in placement:
            first = row.index(rank)
            heads.append(sum(costs.at("forward", schedule, s) + costs.message(s) for s in range(first)))
        # micro-batches may be divided between the replicas in any way
        works = [sum(total[s] for s, holder in enumerate(row) if holder == rank) for row in placement]
        # a rank starts its work after its first input has arrived
        bounds.append(min(heads) + micro_batches * min(works))
    return max(bounds)


# ---- local search ----


def _improve(timeline: Timeline, costs: Costs, memory: float, tries: int) -> Timeline:
    """Try random moves of actions within ranks, and keep a move if the schedule fits and is not slower."""
    generator, best = random.Random(0), timeline
    for _ in range(tries):
        changed = _move(best.schedule, generator)
        try:
            found = simulate(changed, costs)
        except ScheduleError:
            continue
        fits = found.peak <= memory + 1e-9
        if fits and (found.makespan, sum(found.peaks)) <= (best.makespan, sum(best.peaks)):
            best = found
    if best.makespan < timeline.makespan - 1e-9:
        name = f"{timeline.schedule.name}, improved"
        return replace(best, schedule=replace(best.schedule, name=name))
    return timeline


def _move(schedule: Schedule, generator: random.Random) -> Schedule:
    rank = generator.randrange(schedule.ranks)
    actions = list(schedule.actions[rank])
    place = generator.randrange(len(actions))
    action = actions.pop(place)
    actions.insert(max(0, min(len(actions), place + generator.choice((-3, -2, -1, 1, 2, 3)))), action)
    changed = list(schedule.actions)
    changed[rank] = tuple(actions)
    return replace(schedule, actions=tuple(changed))
