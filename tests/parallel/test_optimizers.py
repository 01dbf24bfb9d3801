"""An optimizer under `parallelize` gives the parameters of one process, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole import Plan
from farandole.parallel.optimizers import why_not_elementwise

SHARE, STEPS = 3, 4


class Lamb(torch.optim.Optimizer):
    """You et al., 2020: the size of a step depends on the norm of the whole parameter."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            _ = closure and closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-6)))


class GlobalNorm(torch.optim.Optimizer):
    """A step that depends on all gradients together, as that of Prodigy does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            _ = closure and closure()
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / float(norm + 1e-3))


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
}
OTHERS: dict[str, Make] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], 0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "Lamb": Lamb,
    "GlobalNorm": GlobalNorm,
}


def _model(name: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 4, 3, padding=1)
    if name != "LBFGS":  # which takes contiguous gradients only
        convolution = convolution.to(memory_format=torch.channels_last)
    return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 5))


def _batches(name: str = "") -> Tensor:
    batches = torch.randn(STEPS, SHARE * 2, 3, 4, 4, generator=torch.Generator().manual_seed(7))
    if name == "Muon":  # bf16 in it makes much of rounding errors: equal samples on both ranks have none
        batches[:, SHARE:] = batches[:, :SHARE]
    return batches


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, compute: Any, batches: Tensor, share: slice
) -> None:
    for batch in batches:

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = compute(batch[share]).float().square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def _whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def _parallel(
    rank: int, size: int, name: str, zero: int, precision: Any, resumed: bool
) -> dict[str, Tensor] | str:
    model = _model(name)
    make = (ELEMENTWISE | OTHERS)[name]
    optimizer = make(list(model.parameters()))
    batches = _batches(name)
    if resumed:  # the first half alone: all ranks compute with all samples
        _steps(model, optimizer, model, batches[:2], slice(None))
        batches = batches[2:]
    engine = farandole.parallelize(model, Plan(zero=zero, precision=precision))
    try:
        engine.optimizer(optimizer)
        _steps(model, optimizer, engine, batches, slice(rank * SHARE, (rank + 1) * SHARE))
        state = engine.state_dict()
        torch.distributed.barrier()
        return state
    except ValueError as error:
        return str(error)
    finally:
        engine.close()


def _compare(result: dict[str, Tensor] | str, expected: dict[str, Tensor], **tolerance: float) -> None:
    assert not isinstance(result, str), result
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def _train_alone(rank: int, size: int, name: str) -> dict[str, Tensor]:
    model = _model(name)
    optimizer = (ELEMENTWISE | OTHERS)[name](list(model.parameters()))
    _steps(model, optimizer, model, _batches(name), slice(SHARE) if name == "Muon" else slice(None))
    return _whole_state(model)


def _alone(ranks: Any, name: str) -> dict[str, Tensor]:
    """What plain PyTorch makes of it, with as many threads as a rank has: sums are rounded alike."""
    (state,) = ranks(1).run(_train_alone, name)
    return cast("dict[str, Tensor]", state)


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_of_elements_may_have_a_state(ranks: Any, name: str, zero: int, backend: str) -> None:
    expected = _alone(ranks, name)
    # Rprop looks at signs, and the sums of two ranks are rounded in another way than those of one process
    tolerance = {"rtol": 1e-3, "atol": 1e-5}
    for resumed in (False, True):
        for result in ranks(2, backend).run(_parallel, name, zero, "fp32", resumed):
            _compare(result, expected, **tolerance)


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_of_matrices_is_exact_or_refused(ranks: Any, name: str) -> None:
    for result in ranks(2).run(_parallel, name, 0, "fp32", False):
        _compare(result, _alone(ranks, name), rtol=1e-3, atol=2e-5)
    for zero in (1, 2, 3):
        for result in ranks(2).run(_parallel, name, zero, "fp32", False):
            assert isinstance(result, str)
            assert f"{name} cannot be used with zero={zero}" in result
    for result in ranks(1).run(_parallel, name, 2, "fp32", False):
        assert not isinstance(result, str)


@pytest.mark.parametrize("name", ELEMENTWISE | OTHERS)
def test_two_steps_tell_which_optimizers_update_elements(name: str) -> None:
    parameters = list(_model().parameters())
    optimizer = (ELEMENTWISE | OTHERS)[name](parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # has its own step of the optimizer
    assert bool(why_not_elementwise(optimizer)) == (name in OTHERS)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert schedule.last_epoch == 0
    assert not any("step" in state and float(state["step"]) for state in optimizer.state.values())


def _two_optimizers(rank: int, size: int, zero: int) -> tuple[list[float], list[int]]:
    """fp16 with a step that overflows: each step counts once, whatever the number of optimizers."""
    model = _model()
    engine = farandole.parallelize(model, Plan(zero=zero, precision="fp16"))
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [engine.optimizer(torch.optim.SGD(half, 0.01)) for half in halves]
    scales = []
    for step, batch in enumerate(_batches()):
        loss = engine(batch[rank * SHARE : (rank + 1) * SHARE]).float().square().mean()
        engine.backward(loss * float("inf") if step == 1 and rank == 1 else loss)
        skipped = []
        for optimizer in optimizers:
            optimizer.step()
            skipped.append(engine.skipped)
            optimizer.zero_grad()
        assert skipped == [step == 1] * 2
        scales.append(engine.scaler.scale)
    counts = [engine.scaler.steps, engine.scaler.skipped]
    engine.close()
    return scales, counts


@pytest.mark.parametrize("zero", [0, 2])
def test_two_optimizers_are_one_step(ranks: Any, zero: int) -> None:
    for scales, counts in ranks(2).run(_two_optimizers, zero):
        assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
        assert counts == [STEPS, 1]


def _loaded_in_bf16(rank: int, size: int, zero: int) -> dict[str, Tensor]:
    """A model whose weights are bf16 gets masters, in which small updates add up."""
    model = nn.Linear(64, 64).bfloat16()
    nn.init.ones_(model.weight)
    engine = farandole.parallelize(model, Plan(zero=zero, precision="bf16"))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 1e-3))
    for _ in range(16):
        engine(torch.ones(1, 64)).float().sum().backward()  # a gradient of 1: each update is lost in bf16
        optimizer.step()
        optimizer.zero_grad()
    state = engine.state_dict()
    torch.distributed.barrier()
    engine.close()
    return state


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_weights_in_bf16_have_masters(ranks: Any, zero: int) -> None:
    for state in ranks(2).run(_loaded_in_bf16, zero):
        assert state["weight"].dtype == torch.float32
        torch.testing.assert_close(state["weight"], torch.full((64, 64), 1 - 0.016))


def _double(rank: int, size: int, zero: int) -> float:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).double()
    engine = farandole.parallelize(model, Plan(zero=zero))
    engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    engine(torch.ones(1, 8, dtype=torch.float64)).square().sum().backward()
    norm = engine.clip(0.5)
    assert abs(engine.gradient_norm() - 0.5) < 1e-9
    engine.close()
    return norm


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_in_fp64_are_clipped(ranks: Any, zero: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).double()
    model(torch.ones(1, 8, dtype=torch.float64)).square().sum().backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert ranks(2).run(_double, zero) == pytest.approx([expected] * 2, rel=1e-12)


def _batch_norm(rank: int, size: int, zero: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=0.2), nn.Linear(5, 3))
    engine = farandole.parallelize(model, Plan(zero=zero))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        engine(torch.full((4, 6), float(rank + step)) + torch.eye(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.state_dict()
    torch.distributed.barrier()
    engine.close()
    return {name: value for name, value in state.items() if name.startswith("1.")}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_statistics_of_batch_norm_are_the_mean_of_all_ranks(ranks: Any, zero: int, backend: str) -> None:
    one, other = ranks(2, backend).run(_batch_norm, zero)
    for name in one:
        assert torch.equal(one[name], other[name]), name
    (alone,) = ranks(1).run(_batch_norm, 0)
    assert not torch.equal(one["1.running_mean"], alone["1.running_mean"])
    assert one["1.num_batches_tracked"] == 3


def _alternate(rank: int, size: int, zero: int | None) -> dict[str, Tensor]:
    """Two optimizers take turns, as those of a generator and its critic; each clears its own gradients."""
    model, share = _model(), slice(rank * SHARE, (rank + 1) * SHARE)
    engine = None if zero is None else farandole.parallelize(model, Plan(zero=zero))
    compute = engine or model
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(half, 0.05, momentum=0.9) for half in (parameters[:3], parameters[3:])]
    for optimizer in optimizers:
        _ = engine and engine.optimizer(optimizer)
    for batch in _batches():
        for turn, optimizer in enumerate(optimizers):
            output = compute(batch[share] if engine else batch)
            (output.square().mean() if turn else output.abs().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = engine.state_dict() if engine else _whole_state(model)
    if engine:
        torch.distributed.barrier()
        engine.close()
    return state


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_optimizers_that_take_turns(ranks: Any, zero: int, backend: str) -> None:
    (expected,) = ranks(1).run(_alternate, None)
    for result in ranks(2, backend).run(_alternate, zero):
        _compare(result, expected, rtol=1e-4, atol=1e-6)
