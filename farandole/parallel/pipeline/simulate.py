"""Simulate a schedule: compute the start and end of each action, the idle time, and the activation memory.

    timeline = simulate(build("1f1b", 4, 16))          # F = I = W = 1
    timeline.makespan, timeline.idle, timeline.peak    # 57.0, 0.158, 4.0

An action starts when its rank has finished the previous action in the schedule and the action's inputs have arrived:

- Forward needs the forward pass of the previous stage.
- BackwardInput and Backward need the forward pass of the same stage and the backward pass of the next stage.
- BackwardWeight needs the input gradient of the same stage.

`simulate` therefore also proves that a schedule is complete and free of deadlock: the simulation runs every action, and
stops with a `ScheduleError` if no rank can continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farandole.parallel.pipeline.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    ScheduleError,
)

PerStage = float | Sequence[float]
"""One cost for a rank's whole part of the model, divided equally among the rank's chunks; or one cost per stage."""


@dataclass(frozen=True)
class Costs:
    """The time and memory costs of the actions on one micro-batch, in arbitrary units.

    Args:
        forward: the time of a forward pass, F.
        input: the time of an input gradient, I.
        weight: the time of a weight gradient, W.
        send: the time until an output arrives on another rank, or a list with the time for each boundary between two
            stages; ranks compute during this time.
        activation: the memory that a forward pass stores for the backward pass.
        waiting: the memory that is stored between the input gradient and the weight gradient; None means `activation`.
        recompute: whether backward passes repeat the forward pass, so that only the stage's input is stored.
        stage_input: the size of a stage's input, for `recompute`.
    """

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    send: float | Sequence[float] = 0.0
    activation: PerStage = 1.0
    waiting: PerStage | None = None
    recompute: bool = False
    stage_input: float = 0.0

    def at(self, name: str, schedule: Schedule, stage: int) -> float:
        """Return the cost `name` of one stage.

        Args:
            name: a field of this class, such as "forward".

        Raises:
            ScheduleError: if the length of a list of costs is not the number of stages.
        """
        value = getattr(self, name)
        if value is None:
            value = self.activation
        if isinstance(value, Sequence):
            if len(value) != schedule.stages:
                raise ScheduleError(
                    f"{name}: expected one cost for each of the {schedule.stages} stages of {schedule.name}, got "
                    f"{len(value)}"
                )
            return float(value[stage])
        return float(value) / schedule.chunks

    def message(self, stage: int) -> float:
        """Return the time of a message between a stage and the next stage, in the unit of the costs."""
        return self.send[stage] if isinstance(self.send, Sequence) else self.send

    def time(self, action: Action, schedule: Schedule) -> float:
        """Return the time of an action, in the unit of the costs."""
        parts = {Forward: ("forward",), BackwardInput: ("input",), BackwardWeight: ("weight",)}
        names = parts.get(type(action), ("input", "weight"))
        time = sum(self.at(name, schedule, action.stage) for name in names)
        return time + self.repeated(action, schedule)

    def repeated(self, action: Action, schedule: Schedule) -> float:
        """Return the time of the forward pass that `action` repeats; 0 if it repeats none."""
        repeats = self.recompute and isinstance(action, Backward | BackwardInput)
        return self.at("forward", schedule, action.stage) if repeats else 0.0


Ends = dict[tuple[str, int, int], float]
"""The time at which each result exists; a key is "F", "I" or "W" (as in `Costs`), the stage and the micro-batch."""


@dataclass(frozen=True)
class Span:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated or measured run of a schedule.

    Args:
        spans: the actions of each rank.
        peaks: the peak activation memory of each rank.
        repeated: the total time of repeated forward passes.
        messages: the number of messages that each rank sends.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]
    peaks: tuple[float, ...]
    repeated: float
    messages: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """The time from the start of the first action to the end of the last action, in the unit of the costs."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time during which each rank computes, in the unit of the costs."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def idle(self) -> float:
        """The fraction of the makespan during which ranks do not compute, averaged over ranks."""
        return 1 - sum(self.busy) / (self.makespan * self.schedule.ranks) if self.makespan else 0.0

    @property
    def lost(self) -> float:
        """The fraction of the makespan during which ranks are idle or repeat forward passes, averaged over ranks."""
        useful = sum(self.busy) - self.repeated
        return 1 - useful / (self.makespan * self.schedule.ranks) if self.makespan else 0.0

    @property
    def peak(self) -> float:
        """The highest peak activation memory of any rank."""
        return max(self.peaks)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Return the timeline of a schedule.

    Raises:
        ScheduleError: if the schedule is incomplete or deadlocks.
    """
    check_complete(schedule)
    costs = costs or Costs()
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    ends: Ends = {}
    blocked = set(range(schedule.ranks))
    while blocked:
        progress = False
        for rank in sorted(blocked):
            actions, done = schedule.actions[rank], spans[rank]
            while len(done) < len(actions):
                action = actions[len(done)]
                ready = ready_at(action, schedule, costs, ends)
                if ready is None:
                    break
                start = max(ready, done[-1].end if done else 0.0)
                end = start + costs.time(action, schedule)
                done.append(Span(action, start, end))
                record(action, end, ends)
                progress = True
            if len(done) == len(actions):
                blocked.discard(rank)
        if blocked and not progress:
            raise ScheduleError(_deadlock(schedule, spans, ends))
    repeated = sum(costs.repeated(action, schedule) for actions in schedule.actions for action in actions)
    return Timeline(
        schedule,
        costs,
        tuple(map(tuple, spans)),
        tuple(peak_of(schedule, costs, actions) for actions in schedule.actions),
        repeated,
        _messages(schedule),
    )


def inputs_of(action: Action, schedule: Schedule) -> Iterator[tuple[str, int]]:
    """Yield (kind, stage) for each result that an action needs: "F" for forward passes, "I" for input gradients."""
    if isinstance(action, Forward):
        if action.stage:
            yield "F", action.stage - 1
    elif isinstance(action, BackwardWeight):
        yield "I", action.stage
    else:
        yield "F", action.stage
        if action.stage < schedule.stages - 1:
            yield "I", action.stage + 1


def check_complete(schedule: Schedule) -> None:
    """Check that each rank runs all passes of its stages exactly once, and in a valid order.

    Dependencies between actions of different ranks are not checked.

    Raises:
        ScheduleError: if an action is missing, repeated, on the wrong rank or too early; the message names this action.
    """
    expected = {
        (code, stage, m)
        for code in "FIW"
        for stage in range(schedule.stages)
        for m in range(schedule.micro_batches)
    }
    done: set[tuple[str, int, int]] = set()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            results = [(code, action.stage, action.micro_batch) for code in _results(action)]
            where = f"{schedule.name}: {action} on rank {rank}"
            if not set(results) <= expected:
                raise ScheduleError(
                    f"{where}: expected stages from 0 to {schedule.stages - 1} and micro-batches from 0 to "
                    f"{schedule.micro_batches - 1}"
                )
            if schedule.rank_of(action.stage, action.micro_batch) != rank:
                holder = schedule.rank_of(action.stage, action.micro_batch)
                raise ScheduleError(f"{where}: expected this action on rank {holder}, which has the stage")
            if not done.isdisjoint(results):
                raise ScheduleError(f"{where} runs twice; remove one of the two actions")
            for code, stage in inputs_of(action, schedule):
                needed = (code, stage, action.micro_batch)
                if schedule.rank_of(stage, action.micro_batch) == rank and needed not in done:
                    raise ScheduleError(f"{where} runs before {code}{action.micro_batch} of stage {stage}")
            done.update(results)
    if expected - done:
        code, stage, m = min(expected - done)
        raise ScheduleError(f"{schedule.name}: {code}{m} of stage {stage} is missing")


def record(action: Action, end: float, ends: Ends) -> None:
    """Record in `ends` that the results of an action are available at the time `end`."""
    for code in _results(action):
        ends[code, action.stage, action.micro_batch] = end


def _results(action: Action) -> str:
    return "IW" if isinstance(action, Backward) else action.code


def ready_at(action: Action, schedule: Schedule, costs: Costs, ends: Ends) -> float | None:
    """Return the time at which the inputs of `action` have arrived, or None if an input has not been computed yet."""
    ready, rank = 0.0, schedule.rank_of(action.stage, action.micro_batch)
    for code, stage in inputs_of(action, schedule):
        end = ends.get((code, stage, action.micro_batch))
        if end is None:
            return None
        remote = schedule.rank_of(stage, action.micro_batch) != rank
        ready = max(ready, end + (costs.message(min(stage, action.stage)) if remote else 0.0))
    return ready


def _deadlock(schedule: Schedule, spans: Sequence[Sequence[Span]], ends: Ends) -> str:
    waits = []
    for rank, (actions, done) in enumerate(zip(schedule.actions, spans, strict=True)):
        if len(done) < len(actions):
            action = actions[len(done)]
            code, stage = next(
                (code, stage)
                for code, stage in inputs_of(action, schedule)
                if (code, stage, action.micro_batch) not in ends
            )
            waits.append(f"rank {rank} cannot run {action} before {code} of stage {stage}")
    return f"{schedule.name} deadlocks: {'; '.join(waits)}"


def peak_of(schedule: Schedule, costs: Costs, actions: Sequence[Action]) -> float:
    """Return the peak activation memory of a rank that runs `actions`."""
    held = peak = 0.0
    for action in actions:
        stage = action.stage
        full = costs.at("activation", schedule, stage)
        kept = costs.stage_input if costs.recompute else full
        waiting = costs.at("waiting", schedule, stage)
        if isinstance(action, Forward):
            peak = max(peak, held + full)
            held += kept
        elif isinstance(action, BackwardWeight):
            held -= waiting
        else:
            peak = max(peak, held - kept + full)
            held += (waiting if isinstance(action, BackwardInput) else 0.0) - kept
        peak = max(peak, held)
    return peak


def _messages(schedule: Schedule) -> tuple[int, ...]:
    sent = [0] * schedule.ranks
    for m in range(schedule.micro_batches):
        for stage in range(schedule.stages - 1):
            rank, other = schedule.rank_of(stage, m), schedule.rank_of(stage + 1, m)
            if rank != other:
                sent[rank] += 1
                sent[other] += 1
    return tuple(sent)
