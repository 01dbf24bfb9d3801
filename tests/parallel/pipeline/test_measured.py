"""The timeline of measured actions."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import farandole
from farandole.comm.communicator import Communicator
from farandole.parallel.pipeline import measured
from farandole.parallel.pipeline.measured import clock_shift, measured_timeline, timeline_of
from farandole.parallel.pipeline.schedule import build
from farandole.parallel.pipeline.simulate import Costs, Span, simulate
from farandole.plan import Plan


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "gems"])
def test_the_measured_costs_of_a_simulated_step_are_its_costs(name: str) -> None:
    """A simulation with the costs found in a timeline repeats the timeline, wherever its clock starts."""
    schedule = build(name, 2, 4)
    stages = range(schedule.stages)
    costs = Costs([1.0 + s for s in stages], [2.0 + s for s in stages], [0.5 + s for s in stages])
    expected = simulate(schedule, costs)
    later = [[Span(s.action, s.start + 7, s.end + 7) for s in row] for row in expected.spans]
    found = timeline_of(schedule, later)
    assert found.spans == expected.spans
    assert found.idle == pytest.approx(expected.idle)
    assert simulate(schedule, found.costs).makespan == pytest.approx(expected.makespan)


class Sleeping(nn.Module):
    """Sleeps in forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        result: Tensor = self.linear(x)
        return result


def _step(rank: int, size: int) -> Any:
    engine = farandole.parallelize(nn.Sequential(Sleeping(), Sleeping()), Plan(pipeline=2))
    engine.forward_backward([torch.randn(3, 4) for _ in range(3)], lambda y, _: (y.sum(), 1))
    assert engine.pipeline is not None
    timeline = measured_timeline(engine.pipeline, engine.comm)
    return timeline.spans, timeline.costs.forward, engine.pipeline.schedule(3).actions


def test_a_step_records_its_actions_and_not_the_time_of_waiting(ranks: Any) -> None:
    """Actions follow the schedule on one clock; a forward pass starts after the one that it needs."""
    spans, forward, actions = ranks(2).run(_step)[0]
    assert [[s.action for s in row] for row in spans] == [list(row) for row in actions]
    assert all(seconds >= 0.02 for seconds in forward)
    assert spans[1][0].start >= spans[0][0].start + 0.019  # the recorded end can be later than the message


def _shift(rank: int, size: int) -> float:
    assert dist.group.WORLD is not None
    with mock.patch.object(measured, "hosts_of", lambda comm: [f"host{each}" for each in range(comm.size)]):
        return clock_shift(Communicator(dist.group.WORLD))


def test_a_difference_of_clocks_is_measured_with_messages(ranks: Any) -> None:
    """Ranks on this host have one clock, so the measured difference is the error of the measurement."""
    first, *others = ranks(3).run(_shift)
    assert first == 0
    assert all(0 < abs(shift) < 0.05 for shift in others)
