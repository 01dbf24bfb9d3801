"""Build a schedule by list scheduling: a simulation in which a priority rule chooses each rank's next action.

Whenever a rank is free, it runs the ready action with the smallest key.  A forward pass is ready if its input has
arrived and its activations fit in the rank's memory (Graham, 1966, "Bounds for Certain Multiprocessing Anomalies").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from farandole.parallel.pipeline.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Placement,
    Schedule,
    freeze,
)
from farandole.parallel.pipeline.simulate import Costs, ready_at, record

Key = Callable[[Action], tuple[float, ...]]
"""A function that returns the priority of an action; the action with the smallest value runs first."""


def list_schedule(
    name: str,
    placement: Placement,
    replicas: Sequence[int],
    key: Key,
    *,
    costs: Costs | None = None,
    memory: float = math.inf,
    split: bool = False,
) -> Schedule | None:
    """Return the schedule that the priority rule `key` produces, or None if activations do not fit in `memory`.

    Args:
        memory: the limit on the activation memory of a rank, in the unit of `costs.activation`; with two replicas,
            each replica gets half.
        split: whether to compute the gradients of inputs and weights in separate actions.
    """
    ranks, stages = max(placement[0]) + 1, len(placement[0])
    empty = Schedule(name, ((),) * ranks, placement, tuple(replicas))
    state = _State(empty, costs or Costs(), memory, split)
    for m in range(len(replicas)):
        state.offer(Forward(0, m), 0.0)
    total = stages * len(replicas) * (3 if split else 2)
    for _ in range(total):
        choice = state.next(key)
        if choice is None:
            return None
        state.run(*choice)
    return Schedule(name, freeze(state.actions), placement, tuple(replicas))


class _State:
    """The state of the simulation: the actions that each rank has run, and the actions that are ready."""

    def __init__(self, schedule: Schedule, costs: Costs, memory: float, split: bool) -> None:
        self.schedule, self.costs, self.split = schedule, costs, split
        self.actions: list[list[Action]] = [[] for _ in range(schedule.ranks)]
        self._free = [0.0] * schedule.ranks
        self._ready: list[dict[Action, float]] = [{} for _ in range(schedule.ranks)]
        replicas = len(schedule.placement)
        self._limit = memory / replicas + 1e-9
        self._held = [[0.0] * replicas for _ in range(schedule.ranks)]
        sizes = [costs.at("activation", schedule, stage) for stage in range(schedule.stages)]
        self._activation = sizes
        # A rank keeps memory for one micro-batch in each later chunk.  Micro-batches pass through a stage in order, so that
        # the oldest one can always proceed to its backward pass, which frees memory.
        self._later = [
            sum(sizes[s] for s in range(stage + 1, schedule.stages) if row[s] == row[stage])
            for row in schedule.placement[:1]
            for stage in range(schedule.stages)
        ]

    def offer(self, action: Action, time: float) -> None:
        """Add an action whose inputs become available at `time`."""
        self._ready[self._rank(action)][action] = time

    def next(self, key: Key) -> tuple[int, Action, float] | None:
        """Return the rank that can start first, its action and the start time, or None if no action can start."""
        best: tuple[float, tuple[float, ...], int, Action] | None = None
        for rank, ready in enumerate(self._ready):
            allowed = [(max(time, self._free[rank]), a) for a, time in ready.items() if self._fits(rank, a)]
            if not allowed:
                continue
            start = min(time for time, _ in allowed)
            if best is not None and start >= best[0]:
                continue
            action = min((a for time, a in allowed if time <= start), key=key)
            best = (start, key(action), rank, action)
        return None if best is None else (best[2], best[3], best[0])

    def run(self, rank: int, action: Action, start: float) -> None:
        """Run an action, and add the actions that become ready as a result."""
        schedule, stage, m = self.schedule, action.stage, action.micro_batch
        replica = schedule.replicas[m]
        end = start + self.costs.time(action, schedule)
        self.actions[rank].append(action)
        self._free[rank] = end
        del self._ready[rank][action]
        backward = BackwardInput if self.split else Backward
        kept = self.costs.stage_input if self.costs.recompute else self._activation[stage]
        waiting = self.costs.at("waiting", schedule, stage)
        if isinstance(action, Forward):
            self._held[rank][replica] += kept
            last = stage == schedule.stages - 1
            self._send(backward(stage, m) if last else Forward(stage + 1, m), rank, end)
        elif isinstance(action, BackwardWeight):
            self._held[rank][replica] -= waiting
        else:
            self._held[rank][replica] -= kept
            if stage:
                self._send(backward(stage - 1, m), rank, end)
            if self.split:
                self._held[rank][replica] += waiting
                self.offer(BackwardWeight(stage, m), end)

    def _send(self, action: Action, rank: int, time: float) -> None:
        boundary = action.stage - isinstance(action, Forward)
        self.offer(action, time + (self.costs.message(boundary) if self._rank(action) != rank else 0.0))

    def _rank(self, action: Action) -> int:
        return self.schedule.rank_of(action.stage, action.micro_batch)

    def _fits(self, rank: int, action: Action) -> bool:
        if not isinstance(action, Forward):
            return True
        held = self._held[rank][self.schedule.replicas[action.micro_batch]]
        return held + self._activation[action.stage] + self._later[action.stage] <= self._limit


def delay_weights(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Return `schedule` with weight gradients moved into idle time after each rank's last forward pass.

    After its last forward pass, a rank computes input gradients as soon as possible, because other ranks wait for
    them.  The rank computes weight gradients when it would otherwise be idle.  Peak activation memory does not
    increase, because only forward passes store activations.
    """
    costs = costs or Costs()
    before: list[list[Action]] = []
    inputs: list[list[Action]] = []
    weights: list[list[Action]] = []
    for actions in schedule.actions:
        end = max(number for number, action in enumerate(actions) if isinstance(action, Forward)) + 1
        before.append(list(actions[:end]))
        inputs.append([action for action in actions[end:] if not isinstance(action, BackwardWeight)])
        weights.append([action for action in actions[end:] if isinstance(action, BackwardWeight)])
    order: list[list[Action]] = [[] for _ in before]
    free = [0.0] * len(before)
    ends: dict[tuple[str, int, int], float] = {}

    def candidates(rank: int) -> Iterator[tuple[float, int, Action, list[Action]]]:
        first = before[rank] or inputs[rank]
        for number, actions in enumerate((first[:1], weights[rank] if not before[rank] else [])):
            for action in actions:
                ready = ready_at(action, schedule, costs, ends)
                if ready is not None:
                    yield max(ready, free[rank]), number, action, weights[rank] if number else first

    for _ in range(sum(map(len, schedule.actions))):
        (start, _, action, source), rank = min(
            ((choice, rank) for rank in range(len(before)) for choice in candidates(rank)),
            key=lambda item: (item[0][:2], item[1]),
        )
        source.remove(action)
        order[rank].append(action)
        free[rank] = start + costs.time(action, schedule)
        record(action, free[rank], ends)
    return replace(schedule, actions=freeze(order))
