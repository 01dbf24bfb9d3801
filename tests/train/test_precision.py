"""The learning rate and the choice of a precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.models.gpt import GPTConfig
from farandole.train import precision
from farandole.train.config import load_config
from farandole.train.optimizer import build_optimizer, learning_rate
from farandole.train.precision import choose_precision

CPU = torch.device("cpu")
MODEL = GPTConfig(vocabulary=300, context=8, layers=1, heads=1, width=16)


def _choose(rank: int, size: int, asked: str, fp32: list[float], bf16: list[float]) -> tuple[str, str]:
    assert dist.group.WORLD is not None
    measured = {torch.float32: fp32[rank], torch.bfloat16: bf16[rank]}
    original = precision._speed
    precision._speed = lambda dtype, *_: measured[dtype]
    try:
        choice = choose_precision(asked, MODEL, 8, Communicator(dist.group.WORLD), CPU)
    finally:
        precision._speed = original
    return choice.name, choice.reason


@pytest.mark.parametrize(
    ("bf16", "expected"), [([400.0, 400.0], "bf16"), ([400.0, 90.0], "fp32"), ([110.0, 400.0], "fp32")]
)
def test_the_slowest_rank_decides_for_all(ranks: Any, bf16: list[float], expected: str) -> None:
    results = ranks(2).run(_choose, "auto", [100.0, 100.0], bf16)
    assert results[0] == results[1]
    assert results[0][0] == expected
    assert "GFLOP/s" in results[0][1]


def test_what_is_asked_is_not_measured(ranks: Any) -> None:
    assert ranks(1).run(_choose, "fp16", [1.0], [1.0]) == [("fp16", "as asked")]


def test_the_probe_measures() -> None:
    assert precision._speed(torch.float32, MODEL, 64, CPU) > 0.0


def test_the_probe_computes_on_the_device_of_the_run() -> None:
    huge = GPTConfig(vocabulary=300, context=8, layers=1, heads=1, width=1 << 24)  # 4 PiB: only meta has room
    assert precision._speed(torch.float32, huge, 64, torch.device("meta")) > 0.0


def test_the_rate_warms_up_and_follows_a_cosine() -> None:
    config = load_config("tiny", ["optimizer.warmup_steps=10", "optimizer.learning_rate=1.0"]).optimizer
    rates = [learning_rate(step, 110, config) for step in range(110)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx((1 + config.final_share) / 2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(config.final_share, rel=0.01)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    matrices, vectors = build_optimizer(model, load_config("tiny").optimizer).param_groups
    assert [p.dim() for p in matrices["params"]] == [2]
    assert {p.dim() for p in vectors["params"]} == {1}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
