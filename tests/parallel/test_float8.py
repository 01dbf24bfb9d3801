"""Products of 8-bit floats: emulated here, because this processor cannot multiply them, and refused if unsupported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.comm.communicator import Communicator
from farandole.models.layers import gated
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import Experts
from farandole.parallel.precision import check_float8_sizes, use_float8
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
    assert use_float8(model, emulate=True) == ["0", "2"]  # 5 outputs are not a multiple of 16
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


def test_products_equal_those_of_rounded_operands() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    inputs = torch.randn(7, 32)
    weight = model[0].weight.detach().clone()
    use_float8(model, emulate=True)

    torch.testing.assert_close(model(inputs), _rounded(inputs) @ _rounded(weight).T)


def _rounded(values: Tensor) -> Tensor:
    """Return values that are scaled by the largest value, and rounded by torch's own 8-bit floats."""
    scale = torch.finfo(torch.float8_e4m3fn).max / values.abs().max()
    return (values * scale).to(torch.float8_e4m3fn).float() / scale


def test_each_expert_scales_its_rows_and_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(3, 16, 32))
    experts, inputs = model[0], torch.randn(6, 16)
    chosen = torch.tensor([[0], [2], [0], [2], [2], [0]])  # no row for one expert
    expected = torch.empty(6, 16)
    with torch.no_grad():
        for number in (0, 2):
            own = chosen[:, 0] == number
            up = _rounded(inputs[own]) @ _rounded(experts.gate_up.weight[number]).T
            expected[own] = _rounded(gated(up, "silu")) @ _rounded(experts.down.weight[number]).T
    assert use_float8(model, emulate=True) == ["0.gate_up", "0.down"]
    found = experts(inputs, chosen, torch.ones(6, 1))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert all(bool(p.grad[[0, 2]].any()) and not bool(p.grad[1].any()) for p in experts.parameters())


def _learn_with_experts(rank: int, size: int, plan: Plan) -> tuple[list[float], list[float]]:
    """Train a mixture whose experts multiply 8-bit floats; all samples are one micro-batch, which has one scale per
    expert."""
    torch.manual_seed(0)
    model: Any = build_mixtral(MixtralConfig(29, 2, 4, 16, 32, experts=4, top=2))
    for block in model[1:3]:
        assert use_float8(block.feed_forward, emulate=True) == ["experts.gate_up", "experts.down"]
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    losses, norms = [], []
    for step in range(STEPS):
        tokens = torch.randint(0, 29, (4, 9), generator=torch.Generator().manual_seed(step))
        own = tokens.chunk(engine.mesh.replicas)[engine.mesh.replica_of(rank)]
        losses.append(
            engine.forward_backward(
                [own], lambda output, _: output, lambda batch: (batch[:, :-1], None, batch[:, 1:])
            ).loss
        )
        norms.append(engine.gradient_norm())
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return losses, norms


@pytest.mark.parametrize("plan", [Plan(expert=2), Plan(context=2, zero=2), Plan(expert=2, tensor=2)])
def test_experts_are_the_same_under_any_plan(ranks: Any, plan: Plan) -> None:
    """Another order of additions can round a value to the next 8-bit float, which differs by 1/8 at most."""
    ((losses, norms),) = ranks(1).run(_learn_with_experts, Plan(data=1))
    for found in ranks(plan.expert * plan.ranks_per_sample).run(_learn_with_experts, plan):
        assert found[0] == pytest.approx(losses, rel=1e-3)
        assert found[1] == pytest.approx(norms, rel=1e-2)


def test_sizes_that_accelerators_cannot_multiply_are_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 24), Experts(3, 16, 32))
    check_float8_sizes(model, ["1.gate_up", "1.down"])
    with pytest.raises(PlanError, match=r"0\.weight has 24 x 16 elements on this rank.*smaller tensor axis"):
        check_float8_sizes(model, ["0", "1.down"])


def _learn(rank: int, size: int, zero: int, recompute: Any) -> list[Tensor]:
    """Return the bf16 weights after some steps; all ranks have the same micro-batches, and therefore equal scales."""
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
        assert "this machine's CPU does not support products of 8-bit floats" in text
        assert "nearest plan: precision='bf16'" in text


def test_a_model_without_suitable_layers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"contains an nn\.Linear with sizes that are multiples of 16"):
        use_float8(nn.Sequential(nn.Linear(5, 5)), emulate=True)
    with pytest.raises(PlanError, match=r"requires a model that contains an nn\.Linear"):
        use_float8(nn.Linear(16, 16), emulate=True)
