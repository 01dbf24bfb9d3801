"""Products of 8-bit floats: emulated here, where nothing multiplies them, and refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.comm.communicator import Communicator
from farandole.parallel.precision import use_float8
from farandole.plan import Plan, PlanError

pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")

STEPS = 3


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48, bias=False), nn.Linear(48, 5))


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 32, generator=generator), torch.randn(8, 5, generator=generator)


def test_suitable_layers_are_converted_and_keep_their_parameters() -> None:
    model = _model()
    before = list(model.parameters())
    assert use_float8(model, emulate=True) == ["0", "2"]  # 5 outputs are no multiple of 16
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


def test_products_equal_those_of_rounded_operands() -> None:
    """Against torch's own 8-bit floats: scaled by the largest value, cast, multiplied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    inputs = torch.randn(7, 32)
    weight = model[0].weight.detach().clone()
    use_float8(model, emulate=True)

    def rounded(values: Tensor) -> Tensor:
        scale = torch.finfo(torch.float8_e4m3fn).max / values.abs().max()
        return (values * scale).to(torch.float8_e4m3fn).float() / scale

    torch.testing.assert_close(model(inputs), rounded(inputs) @ rounded(weight).T)


def _learn(rank: int, size: int, zero: int, recompute: Any) -> list[Tensor]:
    """The bf16 weights after some steps, whole; a scale is that of a micro-batch, so that all ranks have the same one."""
    model = _model()
    use_float8(model, emulate=True)
    plan = Plan(zero=zero, precision="bf16", recompute=recompute)
    engine = farandole.parallelize(model, plan, Communicator(torch.distributed.group.WORLD))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        inputs, targets = _batch(step)
        loss = (engine(inputs.bfloat16()).float() - targets).square().mean()
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    with engine.whole():
        found = [parameter.detach().clone() for parameter in model.parameters()]
    engine.close()
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_losses_are_the_same_under_any_plan(ranks: Any, zero: int) -> None:
    (alone,) = ranks(1).run(_learn, 0, "none")
    changed = [p.bfloat16() for p in _model().parameters()]
    assert any(not one.equal(other) for one, other in zip(alone, changed, strict=True))
    for recompute in ("none", "block"):
        for found in ranks(2).run(_learn, zero, recompute):
            for one, other in zip(found, alone, strict=True):
                assert torch.equal(one, other)


def _refused(rank: int, size: int, model: nn.Module) -> str:
    with pytest.raises(PlanError) as refusal:
        farandole.parallelize(model, Plan(precision="fp8"), Communicator(torch.distributed.group.WORLD))
    assert type(model[0]) is nn.Linear
    return str(refusal.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_unsupported_processors_are_refused(ranks: Any) -> None:
    for text in ranks(2).run(_refused, _model()):
        assert "the CPU here does not multiply 8-bit floats" in text
        assert "nearest plan: precision='bf16'" in text


def test_a_model_without_suitable_layers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"nn\.Linear inside the model whose sizes are multiples of 16"):
        use_float8(nn.Sequential(nn.Linear(5, 5)), emulate=True)
    with pytest.raises(PlanError, match=r"requires an nn\.Linear inside the model"):
        use_float8(nn.Linear(16, 16), emulate=True)
