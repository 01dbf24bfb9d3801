"""`farandole.parallelize`: the engine for a model and a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole
from farandole import Plan, PlanError
from farandole.parallel.engine import Engine


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"zero": 4}, "zero=4: expected stage 0, 1, 2 or 3"),
        ({"data": 0}, "data=0: expected at least 1 rank"),
        ({"precision": "fp4"}, "precision='fp4': expected one of fp32, bf16, fp16, fp8"),
    ],
)
def test_invalid_plans_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan(**options)


def test_without_ranks() -> None:
    with pytest.raises(RuntimeError, match=r"call farandole\.init\(\) first"):
        farandole.parallelize(nn.Linear(2, 2))


def _check_and_train(rank: int, size: int) -> None:
    with pytest.raises(PlanError, match="data=3: expected 3 ranks, got 2; nearest plan: data=2"):
        farandole.parallelize(nn.Linear(2, 2), Plan(data=3))
    with pytest.raises(PlanError, match="bfloat16: create the model in fp32"):
        farandole.parallelize(nn.Linear(2, 2).bfloat16(), Plan())
    model = nn.Linear(2, 2)
    engine = farandole.parallelize(model, Plan(data=2, zero=2, precision="bf16"))
    assert isinstance(engine, Engine)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    before = [value.float() for value in model.parameters()]
    for _ in range(2):
        output = engine(torch.ones(3, 2))  # the input is cast
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    farandole.Communicator(torch.distributed.group.WORLD).barrier()
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(old - 2 * 0.1 * 3, new.float(), rtol=0.02, atol=0.01)


def test_a_plan_is_checked_and_applied_to_a_model(ranks: Any) -> None:
    ranks(2).run(_check_and_train)
