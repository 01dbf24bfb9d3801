"""`farandole.parallelize`: the engine for a model and a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole
from farandole import LoRA, Plan, PlanError
from farandole.models.layers import FeedForward
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


def _retry(rank: int, size: int, refused: Plan, says: str) -> None:
    """Apply `refused`, check that the error leaves the model unchanged, and train with another plan."""
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(16, 32), FeedForward(16, 1))
    model[0].down.bias.requires_grad_(False)
    calls = []
    handle = model[0].register_forward_hook(lambda *_: calls.append(rank))
    before = str(model), [(name, p, p.shape, p.requires_grad) for name, p in model.named_parameters()]
    with pytest.raises((PlanError, RuntimeError), match=says):
        farandole.parallelize(model, refused)
    after = str(model), [(name, p, p.shape, p.requires_grad) for name, p in model.named_parameters()]
    assert after[0] == before[0]
    for old, new in zip(before[1], after[1], strict=True):
        assert old[1] is new[1] and old[:1] + old[2:] == new[:1] + new[2:]
    engine = farandole.parallelize(model, Plan(lora=LoRA(), recompute="block"))
    engine(torch.ones(3, 16)).sum().backward()
    assert calls
    handle.remove()
    assert not model[0]._forward_hooks
    engine.close()


@pytest.mark.parametrize(
    ("size", "refused", "says"),
    [
        (1, Plan(swap="host"), "use swap='disk:FOLDER'"),
        (1, Plan(lora=LoRA(), precision="bf16", swap="disk:/there/is/none"), "the folder does not exist"),
        (1, Plan(lora=LoRA(), recompute="attention"), "requires an example"),
        (2, Plan(lora=LoRA(), tensor=2), "1 feed-forward units, which cannot be split over 2 ranks"),
        (2, Plan(pipeline=2, recompute="attention"), "requires an example"),
    ],
)
def test_another_plan_can_be_applied_after_an_error(ranks: Any, size: int, refused: Plan, says: str) -> None:
    ranks(size).run(_retry, refused, says)
