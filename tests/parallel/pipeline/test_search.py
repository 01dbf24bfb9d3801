"""The search fits in memory, is at least as good as the known schedules, and never undercuts its lower bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.parallel.pipeline.list_scheduling import delay_weights
from farandole.parallel.pipeline.schedule import ScheduleError, build, registered
from farandole.parallel.pipeline.search import search
from farandole.parallel.pipeline.simulate import Costs, simulate


@settings(max_examples=12, deadline=None)
@given(
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 6),
    times=st.tuples(*[st.floats(0.5, 3)] * 3),
    memory=st.sampled_from([1, 1.5, 2, 3, math.inf]),
)
def test_nothing_known_is_better(ranks, micro_batches, times, memory):
    costs = Costs(*times)
    found = search(ranks, micro_batches, costs, memory, tries=20)
    again = simulate(found.best.schedule, costs)
    assert again.makespan == found.best.makespan >= found.bound - 1e-9
    assert again.peak <= memory + 1e-9
    for name, timeline in found.named.items():
        assert timeline.makespan >= found.bound - 1e-9, name
        if timeline.peak <= memory:
            assert timeline.makespan >= found.best.makespan - 1e-9, name


def test_zero_bubble_is_optimal_without_a_limit():
    found = search(3, 6, tries=0)
    assert found.best.makespan == pytest.approx(found.bound) == 6 * 3 + 1
    assert found.named["zb-v"].makespan == 6 * 3 + 1


def test_costs_per_stage_exclude_other_numbers_of_stages():
    found = search(2, 4, Costs(forward=[1.0, 3.0], input=[1.0, 3.0], weight=[1.0, 3.0]), tries=50)
    assert found.best.makespan >= found.bound >= 4 * 6
    assert "zb-v" not in found.named


def test_an_impossible_limit_is_refused():
    with pytest.raises(ScheduleError, match="fits in memory=0.5; the known schedules need memory=1 or more"):
        search(2, 4, memory=0.5)


@pytest.mark.parametrize("name", [each.name for each in registered()])
def test_delaying_weights_makes_nothing_slower_or_larger(name):
    before = simulate(build(name, 4, 7))
    after = simulate(delay_weights(before.schedule))
    assert after.makespan <= before.makespan
    assert after.peak <= before.peak
