"""Stochastic rounding is unbiased and repeatable, and bf16 weights without masters learn as fp32 ones do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole import Plan, PlanError
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.parallel.engine import Engine
from farandole.parallel.optimizers.rounding import StochasticRounding, round_stochastically
from tests.parallel.odd import world
from tests.parallel.test_zero import STAGES, Listed

BF16 = torch.bfloat16


def _rounded(values: Tensor, seed: int = 0) -> Tensor:
    target = torch.empty(len(values), dtype=BF16)
    round_stochastically(target, values.clone(), torch.Generator().manual_seed(seed))
    return target.float()


@pytest.mark.parametrize("value", [1.0 + 1 / 512, 1.0001, -3.14159, 1e-30, -6.5e-39, 3.0e38])
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    count = 40_000
    values = torch.full((count,), value)
    exact = float(values[0].double())
    rounded = _rounded(values).double()
    neighbors = rounded.unique()
    assert len(neighbors) == 2
    low, high = neighbors.tolist()
    assert low < exact < high
    share = (exact - low) / (high - low)
    deviation = (high - low) * (share * (1 - share) / count) ** 0.5
    assert abs(float(rounded.mean()) - exact) < 4 * deviation


def test_bf16_numbers_are_unchanged() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16).float()
    values = every[every.isfinite()]
    for seed in range(3):
        assert torch.equal(_rounded(values, seed).view(torch.int32), values.view(torch.int32))


def test_infinities_and_nans_are_unchanged() -> None:
    values = torch.tensor([1.0001, float("inf"), -float("inf"), float("nan"), 2.0])
    odd = torch.cat([values, torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])
    for seed in range(5):
        rounded = _rounded(odd, seed)
        assert torch.equal(rounded.isnan(), odd.isnan())
        assert rounded[1:3].tolist() == [float("inf"), -float("inf")]
        assert rounded[4] == 2.0


def test_rounding_depends_only_on_the_seed() -> None:
    values = torch.randn(1001)
    assert torch.equal(_rounded(values, 3), _rounded(values, 3))
    assert not torch.equal(_rounded(values, 3), _rounded(values, 4))


def _gradient(rank: int, step: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank)).to(BF16)


def _neighbors(rank: int, size: int, zero: int) -> None:
    """After every step, each weight is one of the two bf16 numbers next to torch's fp32 result."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(9, 13), nn.Linear(13, 5))
    model[0].bias.requires_grad_(False)
    engine = Engine(model, world(), 200, zero=zero, dtype=BF16, rounding=StochasticRounding(7))
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 0.01))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    reference = copy.deepcopy(model).float()
    plain = torch.optim.AdamW(reference.parameters(), 0.01)
    plain_schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    for step in range(3):
        loss = engine(torch.zeros(1, 9)).float().sum() * 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                loss = loss + (parameter * _gradient(rank, step, parameter.shape)).float().sum()
        engine.backward(loss)
        for theirs, ours in zip(reference.parameters(), model.parameters(), strict=True):
            theirs.data.copy_(ours.detach())
            if theirs.requires_grad:
                gradients = [_gradient(r, step, theirs.shape).float() for r in range(size)]
                theirs.grad = torch.stack(gradients).mean(0)
        world().barrier()
        for either in (optimizer, plain):
            either.step()
        schedule.step()
        plain_schedule.step()
        for theirs, ours in zip(reference.parameters(), model.parameters(), strict=True):
            # the spacing of bf16 numbers with exponent e (from frexp) is 2**(e - 8)
            unit = torch.ldexp(torch.ones(()), torch.frexp(theirs.detach()).exponent - 8)
            assert ((ours.float() - theirs).abs() <= unit * 1.001 + 1e-30).all()
        optimizer.zero_grad()
        world().barrier()
    assert len(calls) == 3
    assert engine.rounding is not None and engine.rounding.steps == 3
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert all(value.dtype == torch.float32 for value in states)
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())
    assert sum(piece.untyped_storage().nbytes() for _, piece, _ in engine.shards()) < 100
    engine.close()


def _train_batch_norm(rank: int, size: int, zero: int) -> None:
    found = []
    for rounding in ("stochastic", "nearest"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        engine = farandole.parallelize(model, Plan(zero=zero, precision="bf16", rounding=rounding))
        optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.5))
        engine.backward(engine(torch.randn(6, 4)).float().square().sum())
        optimizer.step()
        found.append(engine.state_dict()["1.weight"])
        engine.close()
    assert found[0].dtype == torch.float32
    assert torch.equal(*found) and not torch.equal(found[0], torch.ones(4))


@pytest.mark.parametrize("zero", STAGES)
def test_batch_norm_stays_in_fp32(ranks: Any, zero: int) -> None:
    ranks(2).run(_train_batch_norm, zero)


@pytest.mark.parametrize("zero", STAGES)
def test_the_update_matches_fp32(ranks: Any, zero: int) -> None:
    ranks(2).run(_neighbors, zero)


def _train(rank: int, size: int, zero: int, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed if rank == 0 else 1000 + rank)  # the weights of rank 0 are used
    engine_seed = torch.initial_seed()
    model = Listed()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    engine = farandole.parallelize(model, Plan(zero=zero, precision="bf16", rounding="stochastic"))
    assert engine.rounding is not None and (engine.rounding.seed == engine_seed) == (rank == 0)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
    for step in range(4):
        tokens = torch.arange(4 * rank + step, 4 * rank + step + 12).remainder(11).view(2, 6)
        engine.backward(engine(tokens).float().square().mean())
        engine.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    world().barrier()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = {names[id(p)]: value.detach().clone() for p, value in engine.whole_parameters()}
    engine.close()
    return weights


@pytest.mark.parametrize(("zero", "backend"), [(0, "farandole"), (2, "farandole"), (1, "gloo"), (3, "gloo")])
def test_all_ranks_have_the_same_weights(ranks: Any, zero: int, backend: str) -> None:
    first, second = ranks(2, backend).run(_train, zero, 1)
    again, _ = ranks(2, backend).run(_train, zero, 1)
    other, _ = ranks(2, backend).run(_train, zero, 2)
    assert all(
        torch.equal(first[name], second[name]) and torch.equal(first[name], again[name]) for name in first
    )
    assert any(not torch.equal(first[name], other[name]) for name in first)


def _copies(rank: int, size: int, plan: Plan, width: int, copied: str) -> tuple[list[str], dict[str, Tensor]]:
    """Return the first parameter of each bucket, and the weights whose names contain `copied`."""
    torch.manual_seed(0)
    model = build_gpt(GPTConfig(vocabulary=64, context=8, layers=1, heads=3, width=width))
    if plan.pipeline > 1:
        model[1].requires_grad_(False)  # a rank then has only the bucket of the tied embedding
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
    for step in range(3):
        tokens = torch.arange(step, step + 16).view(2, 8)
        engine.forward_backward(
            [tokens], lambda output, _: output, lambda batch: {"inputs": batch, "targets": batch.roll(1, 1)}
        )
        optimizer.step()
        optimizer.zero_grad()
    buckets = [bucket.plan.names[0] for bucket in engine.buckets]
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if copied in name}
    engine.close()
    return buckets, weights


@pytest.mark.parametrize(
    ("axis", "width", "copied"), [({"tensor": 2}, 408, "norm"), ({"pipeline": 2}, 12, "tokens")]
)
def test_copies_in_buckets_with_different_numbers_are_equal(
    ranks: Any, axis: dict[str, int], width: int, copied: str
) -> None:
    plan = Plan(precision="bf16", rounding="stochastic", **axis)
    (buckets, weights), (other_buckets, others) = ranks(2).run(_copies, plan, width, copied)
    assert buckets != other_buckets
    assert weights and weights.keys() == others.keys()
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


def _small_updates(rank: int, size: int) -> tuple[float, float]:
    """Return the mean weight after 400 updates of 1/4000 each, from 1 to 0.9, with stochastic and nearest rounding."""
    model = nn.Linear(100, 20, bias=False)
    nn.init.ones_(model.weight)
    nearest = copy.deepcopy(model).to(BF16)
    engine = farandole.parallelize(model, Plan(precision="bf16", rounding="stochastic"))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 1 / 4000))
    plain = torch.optim.SGD(nearest.parameters(), 1 / 4000)
    for _ in range(400):
        for one, either in ((engine.model, optimizer), (nearest, plain)):
            one(torch.ones(1, 100, dtype=BF16)).sum().backward()
            either.step()
            either.zero_grad()
    engine.close()
    return float(model.weight.float().mean()), float(nearest.weight.float().mean())


def test_small_updates_accumulate(ranks: Any) -> None:
    for ours, theirs in ranks(1).run(_small_updates):
        assert ours == pytest.approx(0.9, abs=0.003)
        assert theirs == 1.0


def _closure(rank: int, size: int, zero: int) -> tuple[list[float], list[Tensor]]:
    """Return the losses of two steps with a closure, and the weights after steps with and without a closure."""
    losses, weights = [], []
    for uses_closure in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        engine = farandole.parallelize(model, Plan(zero=zero, precision="bf16", rounding="stochastic"))
        optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.01))
        inputs = torch.full((1, 4), rank + 1.0)

        def closure() -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss: Tensor = engine(inputs).float().square().mean()  # noqa: B023
            loss.backward()
            return loss

        for _ in range(2):
            if uses_closure:
                losses.append(float(optimizer.step(closure)))
            else:
                closure()
                optimizer.step()
        weights.append(engine.state_dict()["weight"].clone())
        engine.close()
    return losses, weights


@pytest.mark.parametrize("zero", STAGES)
def test_a_step_with_a_closure_matches_a_step_without(ranks: Any, zero: int) -> None:
    for losses, (with_closure, without) in ranks(2).run(_closure, zero):
        assert losses[0] == (16.0 + 64.0) / 2  # the mean over the ranks
        assert losses[1] < losses[0]
        assert torch.equal(with_closure, without)


def _resumed(rank: int, size: int) -> None:
    """With the same weights, optimizer state and number of steps, training continues with the same bits."""

    def step(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        engine(torch.ones(1, 6)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def new(model: nn.Module) -> tuple[Engine, torch.optim.Optimizer]:
        engine = Engine(model, world(), dtype=BF16, rounding=StochasticRounding(5))
        return engine, engine.optimizer(torch.optim.Adam(model.parameters(), 0.01))

    model = nn.Linear(6, 6)
    engine, optimizer = new(model)
    for _ in range(3):
        step(engine, optimizer)
    other = nn.Linear(6, 6)
    other.load_state_dict(model.state_dict())
    again, again_optimizer = new(other)
    again_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.rounding.steps = 3
    step(engine, optimizer)
    step(again, again_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_resumed_run_matches_an_uninterrupted_run(ranks: Any) -> None:
    ranks(1).run(_resumed)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounding": "up"}, "rounding='up': expected one of nearest, stochastic"),
        (
            {"rounding": "stochastic", "precision": "fp16"},
            "with precision='fp16': stochastic rounding needs bf16; nearest plan: precision='bf16'",
        ),
        ({"rounding": "stochastic"}, "with precision='fp32'"),
    ],
)
def test_invalid_plans_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan(**options)
