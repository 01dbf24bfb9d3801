"""The schedules of `torch.distributed.pipelining` compute the same gradients, for all schedules that torch has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import farandole
from farandole.plan import Plan

WIDTH, PARTS = 6, 4
THEIRS = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
SINGLE = ("gpipe", "1f1b")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def _samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def _theirs(rank: int, size: int, name: str) -> dict[str, Tensor]:
    """Return the gradients of torch's schedule."""
    model, device = _model(), torch.device("cpu")
    numbers = {"zb-v": [rank, 3 - rank]}.get(name, [rank, rank + 2])
    groups = [[2 * rank, 2 * rank + 1]] if name in SINGLE else [[number] for number in numbers]
    stages = [
        PipelineStage(
            nn.Sequential(*(model[block] for block in blocks)),
            rank if name in SINGLE else number,
            2 if name in SINGLE else 4,
            device,
        )
        for blocks, number in zip(groups, numbers, strict=False)
    ]
    mean = F.mse_loss
    schedule = THEIRS[name](stages[0] if name in SINGLE else stages, PARTS, loss_fn=mean)
    inputs, targets = _samples()
    schedule.step(*([inputs] if rank == 0 else []), target=targets)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _ours(rank: int, size: int, name: str) -> dict[str, Tensor]:
    model = _model()
    engine = farandole.parallelize(model, Plan(pipeline=2, schedule=name))
    inputs, targets = _samples()
    engine.forward_backward(
        list(zip(inputs.chunk(PARTS), targets.chunk(PARTS), strict=True)),
        lambda output, batch: (F.mse_loss(output, batch[1], reduction="sum"), output.numel()),
    )
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    engine.close()
    return found


@pytest.mark.parametrize("name", THEIRS)
def test_gradients_equal_those_of_torch(ranks: Any, name: str) -> None:
    theirs = ranks(2, "gloo").run(_theirs, name)
    ours = ranks(2).run(_ours, name)
    for expected, found in zip(theirs, ours, strict=True):
        if name != "zb-h1":  # torch's schedule has two chunks per rank
            assert expected.keys() == found.keys()
    expected = {n: g for each in theirs for n, g in each.items()}
    found = {n: g for each in ours for n, g in each.items()}
    assert expected.keys() == found.keys() == {n for n, _ in _model().named_parameters()}
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-7)
