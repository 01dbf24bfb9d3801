"""The division of blocks into stages is the best of all divisions."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import routers_of
from farandole.parallel.pipeline.balance import balance, measure_blocks, parameter_costs
from farandole.parallel.pipeline.schedule import ScheduleError


def _divisions(blocks: int, stages: int):
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        yield [range(a, b) for a, b in itertools.pairwise([0, *cuts, blocks])]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_division_has_a_smaller_maximum(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    row = st.lists(st.integers(1, 5), min_size=len(costs), max_size=len(costs))
    sizes = data.draw(st.lists(row, min_size=stages, max_size=stages))
    memory = data.draw(st.integers(3, 20))
    fitting = [
        max(sum(costs[b] for b in blocks) for blocks in division)
        for division in _divisions(len(costs), stages)
        if all(sum(size[b] for b in blocks) <= memory for size, blocks in zip(sizes, division, strict=True))
    ]
    if not fitting:
        with pytest.raises(ScheduleError, match="use more stages"):
            balance(costs, stages, sizes=sizes, memory=memory)
        return
    found = balance(costs, stages, sizes=sizes, memory=memory)
    assert max(found.costs) == min(fitting)
    assert [block for blocks in found.ranges for block in blocks] == list(range(len(costs)))
    assert all(len(blocks) for blocks in found.ranges)


def test_too_few_blocks_are_refused():
    with pytest.raises(ScheduleError, match="2 blocks cannot be divided into 3 stages; nearest: 2 stages"):
        balance([1, 1], 3)


def test_the_imbalance_is_printed():
    found = balance([1, 2, 3, 4, 5, 1], 3)
    assert str(found) == (
        "blocks of the stages: 0-2 (38 %), 3-3 (25 %), 4-5 (38 %); the slowest stage exceeds the mean by 12 %"
    )


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.linear(x)


def test_blocks_are_measured():
    model = nn.Sequential(Slow(0.0), Slow(0.02), Slow(0.0), Slow(0.0))
    costs = measure_blocks(model, torch.randn(4, 8))
    assert [cost.name for cost in costs] == ["0", "1", "2", "3"]
    assert costs[1].seconds > 0.02
    assert costs[0].activation_bytes == 4 * 4 * 8  # the input
    assert all(parameter.grad is None for parameter in model.parameters())
    assert balance([cost.seconds for cost in costs], 3).ranges[1] == range(1, 2)


def test_a_transformer_is_measured_with_its_positions():
    model = build_gpt(GPTConfig(29, 16, 2, 4, 16))
    costs = measure_blocks(model, torch.ones(2, 9, dtype=torch.int64))
    assert len(costs) == 4
    assert costs[1].activation_bytes == costs[2].activation_bytes > costs[0].activation_bytes
    assert parameter_costs(model)[:2] == [0.0, sum(p.numel() for p in model[1].parameters())]


def test_the_cost_of_experts_is_that_of_the_experts_of_a_token():
    model = build_mixtral(MixtralConfig(29, 2, 4, 16, 24, experts=8, top=2))
    experts = sum(p.numel() for name, p in model[1].named_parameters() if ".experts." in name)
    others = sum(p.numel() for p in model[1].parameters()) - experts
    assert parameter_costs(model)[1] == others + experts * 2 / 8


def test_a_measurement_does_not_change_buffers():
    experts = build_mixtral(MixtralConfig(29, 2, 4, 16, 24, experts=4, top=2))
    norms = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    for model, example in ((experts, torch.ones(2, 9, dtype=torch.int64)), (norms, torch.randn(4, 8))):
        before = [buffer.clone() for buffer in model.buffers()]
        measure_blocks(model, example)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
    assert len(routers_of(experts)) == 2
