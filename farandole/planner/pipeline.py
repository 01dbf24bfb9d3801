"""Predict the memory and the step time of pipeline ranks.

    staged = StagedModel(workload, plan)        # divides the blocks into stages
    step = simulate_step(staged, plan, ranks, machine, StageTracer())
    step.timeline.idle                          # the fraction of time in which ranks do not compute
    step.traces[0].saved                        # bytes of activations on pipeline rank 0

The stages are traced on fake tensors (`planner.stage_trace`), and a step is simulated.  The memory of a rank includes
the activations of micro-batches in flight, the tensors that a split backward pass keeps between the input gradients and
the weight gradients, and received tensors that are not used yet.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from farandole.memory.recompute import apply_recompute
from farandole.parallel.axes import Layouts
from farandole.parallel.pipeline.apply import MEASURED, divided, schedule_of
from farandole.parallel.pipeline.balance import Balance
from farandole.parallel.pipeline.memory import RankActivations
from farandole.parallel.pipeline.schedule import Action, Backward, BackwardInput, Forward
from farandole.parallel.pipeline.simulate import Costs, Timeline, simulate
from farandole.parallel.pipeline.stage import Stage, shallow_copy, split
from farandole.parallel.pipeline.transfers import Message, OutputShape, messages_between
from farandole.plan import Plan, PlanError
from farandole.planner.stage_trace import ActionTrace, Memory, StageTrace, StageTracer
from farandole.planner.trace import Trace
from farandole.planner.workload import Machine, Workload, weight_type


class StagedModel:
    """A model that is divided into stages, with the workload of each pipeline rank.

    Args:
        workload: a result of `Workload.split`, with a model that contains all blocks.
    """

    def __init__(self, workload: Workload, plan: Plan) -> None:
        assert workload.mesh is not None and isinstance(workload.layouts, Layouts)
        model = workload.model
        tensors = (*model.parameters(), *model.buffers())
        self.workload = workload
        self.whole = sum(tensor.nbytes for tensor in tensors)
        """The size of the undivided model in bytes."""
        self.ranks: list[Workload] = []
        self.stages: dict[int, Stage] = {}
        schedule = schedule_of(plan)
        division = divided(model, plan, workload.example, weight_type(plan))  # type: ignore[arg-type]
        layouts = copy.copy(workload.layouts)  # another schedule may place the stages on other ranks
        for rank in range(plan.pipeline):
            own = shallow_copy(model)  # type: ignore[arg-type]
            stages, self.balance = split(own, schedule, rank, layouts, division)
            self.stages |= stages
            cell = next(each for each in workload.mesh.cells if each.pipeline == rank and not each.mirror)
            self.ranks.append(replace(workload, model=own, rank=cell.rank, layouts=layouts))

    balance: Balance
    """The division of the blocks."""


@dataclass(frozen=True)
class PipelineStep:
    """A simulated pipeline step.

    Args:
        timeline: the simulated actions, with times in seconds.
        waiting_s: the time in seconds that messages add to the step.
        traces: for each pipeline rank, its memory in the step and its mean work per micro-batch.
        sent: the number of bytes that each pipeline rank sends to other stages.
    """

    timeline: Timeline
    waiting_s: float
    traces: tuple[Trace, ...]
    sent: tuple[int, ...]


def simulate_step(
    staged: StagedModel, plan: Plan, ranks: int, machine: Machine, tracer: StageTracer
) -> PipelineStep:
    """Trace the stages, and simulate a step.

    Raises:
        PlanError: if the schedule does not support the number of micro-batches.
    """
    workload = staged.workload
    schedule = schedule_of(plan, workload.micro_batches)
    recomputed = _recomputed(staged, plan)
    stages: list[StageTrace] = []
    outputs: list[OutputShape] = []
    for number in range(schedule.stages):
        found, output = tracer.trace(
            workload,
            plan,
            staged.stages[number],
            outputs[-1] if outputs else None,
            splits=schedule.splits_backward,
            recomputed=recomputed,
        )
        stages.append(found)
        outputs.append(output)

    def seconds(action: ActionTrace) -> float:
        between = sum(nbytes / machine.bandwidth_among(group, ranks) for group, nbytes in action.sent.items())
        return action.flops / machine.flops[plan.precision] + action.moved / machine.stream + between

    holders = [staged.ranks[rank].rank for rank in schedule.placement[0]]
    send = [
        Memory.of(outputs[s].tensors).total / machine.bandwidth_among(holders[s : s + 2], ranks)
        for s in range(schedule.stages - 1)
    ]
    costs = Costs(
        forward=[seconds(each.forward) for each in stages],
        input=[seconds(each.input if schedule.splits_backward else each.backward) for each in stages],
        weight=[seconds(each.weight) for each in stages],
    )
    timeline = simulate(schedule, replace(costs, send=send))
    waiting_s = timeline.makespan - simulate(schedule, costs).makespan
    traces = [_trace_of(rank, timeline, stages, outputs) for rank in range(schedule.ranks)]
    return PipelineStep(timeline, max(0.0, waiting_s), tuple(traces), _sent(timeline, outputs))


def _recomputed(staged: StagedModel, plan: Plan) -> dict[str, str]:
    """Return a dict that maps module names to recomputation modes, or an empty dict if the plan needs no dry run."""
    if plan.recompute not in MEASURED:
        return {}
    workload, found = staged.workload, dict[str, str]()
    model = workload.model
    assert isinstance(model, nn.Sequential)
    try:
        for rank in range(plan.pipeline):
            own = RankActivations(model, staged.balance, schedule_of(plan), rank)
            done = apply_recompute(
                model,
                plan.recompute,
                example=workload.example,
                loss=workload.loss,
                budget_bytes=plan.activation_bytes,
                dtype=weight_type(plan),
                blocks=own.blocks,
                kept=own.bytes if plan.recompute == "auto" else None,
            )
            found = done.modules | found
    except ValueError as error:
        raise PlanError(str(error).replace("budget_bytes", "activation_bytes")) from error
    finally:
        apply_recompute(model, "none")
    return found


def _sent(timeline: Timeline, outputs: Sequence[OutputShape]) -> tuple[int, ...]:
    schedule, found = timeline.schedule, [0.0] * timeline.schedule.ranks
    for rank in range(schedule.ranks):
        for peer in set(range(schedule.ranks)) - {rank}:
            found[peer] += sum(
                _message(each, outputs).total for each in messages_between(schedule, peer, rank)
            )
    return tuple(map(int, found))


def _message(message: Message, outputs: Sequence[OutputShape]) -> Memory:
    """Return the size of the output or the gradients that a message contains."""
    code, stage, _ = message
    if code == "F":
        return Memory.of(outputs[stage - 1].tensors)
    return Memory.of(outputs[stage].gradients)


def _trace_of(
    rank: int, timeline: Timeline, stages: Sequence[StageTrace], outputs: Sequence[OutputShape]
) -> Trace:
    """Return the rank's memory in the simulated step and its mean work per micro-batch."""
    held, saved, peak, resident = Memory(), 0.0, 0.0, Memory()
    away = left = 0.0  # bytes that `Plan.swap` has moved, and the peak of the remaining bytes
    flops = moved = swapped = 0.0
    sent: dict[tuple[int, ...], float] = defaultdict(float)
    schedule = timeline.schedule
    waiting = _Received(timeline, rank, outputs)
    polled = 0.0
    for span in timeline.spans[rank]:
        action = span.action
        trace = _traced(action, stages)
        # an output that stays on this rank is also the input of the next stage
        passed = Memory()
        receives = isinstance(action, Forward) and action.stage > 0
        if receives and schedule.rank_of(action.stage - 1, action.micro_batch) == rank:
            passed = Memory.of(outputs[action.stage - 1].tensors)
        base = held + waiting.at(polled, action) - passed
        saved, left = max(saved, base.total), max(left, base.total - away)
        peak = max(peak, base.total + trace.peak)
        resident = resident.largest(base + trace.resident)
        held += trace.kept - passed
        follows = isinstance(action, Backward | BackwardInput) and action.stage + 1 < schedule.stages
        if follows and schedule.rank_of(action.stage + 1, action.micro_batch) == rank:
            held += Memory.of(outputs[action.stage].tensors)
        away, swapped = away + trace.swappable, swapped + trace.swappable
        if isinstance(action, Backward | BackwardInput):
            away -= stages[action.stage].forward.swappable
        saved, left = max(saved, held.total), max(left, held.total - away)
        polled = span.end
        flops, moved = flops + trace.flops, moved + trace.moved
        for group, nbytes in trace.sent.items():
            sent[group] += nbytes
    count = schedule.micro_batches
    return Trace(
        saved=int(saved),
        peak=int(peak),
        flops=int(flops / count),
        moved=int(moved / count),
        resident_peak=int(max(peak, resident.total)),
        swappable=int(saved - left),
        swapped=int(swapped / count),
        sent={group: nbytes / count for group, nbytes in sent.items()},
    )


def _traced(action: Action, stages: Sequence[StageTrace]) -> ActionTrace:
    stage = stages[action.stage]
    if isinstance(action, Forward):
        return stage.forward
    if isinstance(action, Backward):
        return stage.backward
    return stage.input if isinstance(action, BackwardInput) else stage.weight


class _Received:
    """The tensors that a rank has received from other ranks but has not used yet."""

    def __init__(self, timeline: Timeline, rank: int, outputs: Sequence[OutputShape]) -> None:
        schedule = timeline.schedule
        ends = {
            (type(s.action), s.action.stage, s.action.micro_batch): s.end for r in timeline.spans for s in r
        }
        found: list[tuple[float, Message]] = []
        for peer in set(range(schedule.ranks)) - {rank}:
            posted = 0.0  # receives are posted in the order in which the peer sends
            for code, stage, m in messages_between(schedule, peer, rank):
                known = ends[Forward, stage - (code == "F"), m]
                posted = max(posted, known)
                found.append((posted, (code, stage, m)))
        self._coming = sorted(found, key=lambda each: each[0], reverse=True)
        self._present: dict[Message, Memory] = {}
        self._used: set[Message] = set()
        self._outputs = outputs

    def at(self, polled: float, action: Action) -> Memory:
        """Advance to the time `polled`, and return the size of received tensors that will be used after `action`."""
        code = "F" if isinstance(action, Forward) else "I"
        if isinstance(action, Forward | Backward | BackwardInput):
            self._used.add((code, action.stage, action.micro_batch))
        while self._coming and self._coming[-1][0] <= polled:
            _, message = self._coming.pop()
            self._present[message] = _message(message, self._outputs)
        for message in self._used & self._present.keys():
            del self._present[message]
        return sum(self._present.values(), Memory())
