"""Compare a measured step of a pipeline with a simulated step.

    found = measured_timeline(engine.pipeline, comm)         # a collective call
    expected = simulate(found.schedule, found.costs)
    found.idle, expected.idle

The simulation uses the median measured times of each stage.  Therefore the two timelines differ only because of
messages and variations between actions.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from farandole.comm.communicator import Communicator
from farandole.parallel.axes import hosts_of
from farandole.parallel.pipeline.runtime import Pipeline
from farandole.parallel.pipeline.schedule import Backward, BackwardInput, BackwardWeight, Forward, Schedule
from farandole.parallel.pipeline.simulate import Costs, Span, Timeline

_EXCHANGES = 9
"""The number of round trips with which the difference between two clocks is measured."""


def measured_timeline(pipeline: Pipeline, comm: Communicator, ranks: Sequence[int] | None = None) -> Timeline:
    """Return the timeline of the last training step of a pipeline, in seconds.

    This is a collective call of all ranks of `comm`.

    Args:
        ranks: the rank in `comm` of each pipeline rank; by default all ranks in order.
    """
    everyone = comm.all_gather_object(shifted(pipeline.spans, clock_shift(comm)))
    return step_timeline(pipeline, [everyone[rank] for rank in ranks or range(comm.size)])


def step_timeline(pipeline: Pipeline, rows: Sequence[Sequence[Span]]) -> Timeline:
    """Return the timeline of a step.

    Args:
        rows: the measured actions of each pipeline rank, all timed with the same clock.
    """
    micro_batches = 1 + max(span.action.micro_batch for row in rows for span in row)
    return timeline_of(pipeline.schedule(micro_batches), rows)


def shifted(spans: Sequence[Span], seconds: float) -> tuple[Span, ...]:
    """Return the spans with `seconds` added to their starts and ends."""
    return tuple(Span(span.action, span.start + seconds, span.end + seconds) for span in spans)


def timeline_of(schedule: Schedule, rows: Sequence[Sequence[Span]]) -> Timeline:
    """Return the timeline of measured actions, shifted to start at time 0.

    The costs of the timeline are median times.  The timeline does not include memory use.
    """
    begun = min(span.start for row in rows for span in row)
    spans = tuple(shifted(row, -begun) for row in rows)
    nothing = (0,) * schedule.ranks
    return Timeline(schedule, median_costs(schedule, rows), spans, nothing, 0.0, nothing)


def median_costs(schedule: Schedule, rows: Sequence[Sequence[Span]]) -> Costs:
    """Return the median time of each kind of action for each stage.

    If a schedule does not separate weight gradients, their time is included in the time of input gradients.
    """
    times: dict[tuple[type, int], list[float]] = defaultdict(list)
    for row in rows:
        for span in row:
            times[type(span.action), span.action.stage].append(span.end - span.start)

    def of(*kinds: type) -> tuple[float, ...]:
        return tuple(
            sum(statistics.median(times[kind, stage]) for kind in kinds if (kind, stage) in times)
            for stage in range(schedule.stages)
        )

    return Costs(forward=of(Forward), input=of(Backward, BackwardInput), weight=of(BackwardWeight))


def clock_shift(comm: Communicator) -> float:
    """Return the number of seconds to add to this rank's `time.perf_counter` to get rank 0's.

    This is a collective call.

    Ranks on rank 0's host have the same clock.  For other hosts, the shift is measured with messages, and its error is
    at most half of the shortest round trip.
    """
    hosts = hosts_of(comm)
    shift, answer = 0.0, torch.zeros(1, dtype=torch.float64)
    for rank in range(1, comm.size):
        if hosts[rank] == hosts[0] or comm.rank not in (0, rank):
            continue
        best = float("inf")
        for _ in range(_EXCHANGES):
            if comm.rank == 0:
                comm.recv(answer, rank)
                answer.fill_(time.perf_counter())
                comm.send(answer, rank)
                continue
            begun = time.perf_counter()
            comm.send(answer, 0)
            comm.recv(answer, 0)
            ended = time.perf_counter()
            if ended - begun < best:
                best, shift = ended - begun, float(answer) - (begun + ended) / 2
    return shift
