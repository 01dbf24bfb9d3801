"""An optimizer under `parallelize` gives the parameters of one process, or is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole import Plan
from farandole.parallel.engine import Engine
from farandole.parallel.optimizers.probe import why_not_by_parameter, why_not_elementwise
from tests.parallel.backends import STAGES_AND_BACKENDS

SHARE, STEPS = 3, 4


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2020), whose step size depends on the norm of the whole parameter."""

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
    """An optimizer whose step depends on all gradients together, like Prodigy."""

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
MATRICES: dict[str, Make] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], 0.01),
    "Lamb": Lamb,
}
TOGETHER: dict[str, Make] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "GlobalNorm": GlobalNorm,
}
MADE = ELEMENTWISE | MATRICES | TOGETHER


def _model(name: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 4, 3, padding=1)
    if name != "LBFGS":  # which requires contiguous gradients
        convolution = convolution.to(memory_format=torch.channels_last)
    return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 5))


def _batches(name: str = "") -> Tensor:
    batches = torch.randn(STEPS, SHARE * 2, 3, 4, 4, generator=torch.Generator().manual_seed(7))
    if name == "Muon":  # its bf16 arithmetic amplifies rounding errors; equal samples avoid them
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
    rank: int, size: int, name: str, zero: int, precision: Any, resumed: bool, offload: str = "none"
) -> dict[str, Tensor] | str:
    model = _model(name)
    make = MADE[name]
    optimizer = make(list(model.parameters()))
    batches = _batches(name)
    if resumed:  # run the first half without an engine, on all samples
        _steps(model, optimizer, model, batches[:2], slice(None))
        batches = batches[2:]
    engine = farandole.parallelize(model, Plan(zero=zero, precision=precision, offload=offload))
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


@functools.cache
def _alone(name: str) -> dict[str, Tensor]:
    """Return the parameters after training in plain PyTorch."""
    model = _model(name)
    optimizer = MADE[name](list(model.parameters()))
    _steps(model, optimizer, model, _batches(name), slice(SHARE) if name == "Muon" else slice(None))
    return _whole_state(model)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize(("zero", "backend"), STAGES_AND_BACKENDS)
def test_an_elementwise_optimizer_may_have_a_state(ranks: Any, name: str, zero: int, backend: str) -> None:
    expected = _alone(name)
    # Rprop depends on signs, and sums over two ranks are rounded differently from sums in one process
    tolerance = {"rtol": 1e-3, "atol": 1e-5}
    for resumed in (False, True):
        for result in ranks(2, backend).run(_parallel, name, zero, "fp32", resumed):
            _compare(result, expected, **tolerance)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_existing_state_is_offloaded(ranks: Any, name: str) -> None:
    """Adagrad creates its state in its constructor; other optimizers have a state after a step."""
    for zero, resumed in [(0, True), (2, True), (3, name == "Adagrad")]:
        for result in ranks(2).run(_parallel, name, zero, "fp32", resumed, "host"):
            _compare(result, _alone(name), rtol=1e-3, atol=1e-5)


class _Scaled(nn.Module):
    """A model with scalar parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.offset


def _scaled(rank: int, size: int, offload: str) -> dict[str, Tensor]:
    model = _Scaled()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05, initial_accumulator_value=0.2)
    engine = farandole.parallelize(model, Plan(offload=offload))
    engine.optimizer(optimizer)
    _steps(model, optimizer, engine, torch.arange(8.0).view(2, 4), slice(None))
    state = engine.state_dict()
    engine.close()
    return state


def test_the_existing_state_of_scalars_is_offloaded(ranks: Any, tmp_path: Path) -> None:
    (expected,) = ranks(1).run(_scaled, "none")
    for offload in ("host", f"disk:{tmp_path}"):
        (found,) = ranks(1).run(_scaled, offload)
        _compare(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("zero", "backend"), STAGES_AND_BACKENDS)
def test_an_optimizer_of_matrices_updates_whole_matrices(
    ranks: Any, name: str, zero: int, backend: str
) -> None:
    expected = _alone(name)
    for resumed in (False, name != "Muon"):  # whose first half would use other samples
        for result in ranks(2, backend).run(_parallel, name, zero, "fp32", resumed):
            _compare(result, expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", TOGETHER)
def test_an_optimizer_of_all_parameters_is_exact_or_refused(ranks: Any, name: str) -> None:
    for result in ranks(2).run(_parallel, name, 0, "fp32", False):
        _compare(result, _alone(name), rtol=1e-3, atol=2e-5)
    for zero in (1, 2, 3):
        for result in ranks(2).run(_parallel, name, zero, "fp32", False):
            assert isinstance(result, str)
            assert f"{name} cannot be used with zero={zero}" in result
    for result in ranks(1).run(_parallel, name, 2, "fp32", False):
        assert not isinstance(result, str)


def adafactor_refused(engine: Engine) -> str:
    """Return why `engine` refuses Adafactor, and close it."""
    with pytest.raises(ValueError, match="Adafactor cannot be used") as error:
        engine.optimizer(torch.optim.Adafactor(engine.model.parameters()))
    engine.close()
    return str(error.value)


def _plan_refused(rank: int, size: int, options: dict[str, str]) -> str:
    return adafactor_refused(farandole.parallelize(_model(), Plan(zero=2, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"offload": "host"}, "offload"),
        ({"precision": "bf16", "rounding": "stochastic"}, "stochastic rounding"),
    ],
)
def test_optimizers_of_matrices_refuse_offload_and_rounding(
    ranks: Any, options: dict[str, str], what: str
) -> None:
    for message in ranks(2).run(_plan_refused, options):
        assert f"Adafactor cannot be used with {what}" in message


class _Matrices(nn.Module):
    """Matrices that lie within a shard and across shards of three ranks, one that is not trained, and one without a
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(7, 11), (40, 30), (5, 3), (64, 48), (9, 2)]
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.3) for shape in shapes)
        self.matrices[2].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(33, 17))

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([(matrix * scale).tanh().square().sum() for matrix in self.matrices]).sum()


def _mixed_optimizers(
    rank: int, size: int, ways: list[tuple[int, str]], folder: Path
) -> list[dict[str, Tensor]]:
    """Train some matrices with Adafactor and others with AdamW; each way continues from the previous checkpoint."""
    states: list[dict[str, Tensor]] = []
    for number, (zero, precision) in enumerate(ways):
        torch.manual_seed(number)
        model = _Matrices().double() if precision == "fp64" else _Matrices()
        plan = Plan(zero=zero, precision="fp32" if precision == "fp64" else precision)  # type: ignore[arg-type]
        engine = farandole.parallelize(model, plan)
        factored = torch.optim.Adafactor([*model.matrices[:2], model.unused], 0.05, weight_decay=0.1)
        adam = torch.optim.AdamW([model.matrices[3], model.matrices[4]], 0.01)
        optimizers = [engine.optimizer(factored), engine.optimizer(adam)]
        if number:
            engine.load(folder / str(number - 1))
        for step in range(3):
            scale = torch.tensor(1.0 + step + 0.1 * number, dtype=next(model.parameters()).dtype)
            engine.backward(engine(scale))
            engine.clip(1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        engine.save(folder / str(number))
        states.append(engine.state_dict())
        torch.distributed.barrier()
        engine.close()
    return states


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_checkpoints_of_whole_parameters(ranks: Any, tmp_path: Path, size: int, backend: str) -> None:
    (expected,) = ranks(1).run(_mixed_optimizers, [(0, "fp64")] * 5, tmp_path / "alone")
    ways = [(1, "fp64"), (3, "fp64"), (0, "fp64"), (2, "fp64"), (2, "fp64")]
    for found in ranks(size, backend).run(_mixed_optimizers, ways, tmp_path / "ranks"):
        for state, wanted in zip(found, expected, strict=True):
            _compare(state, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_matrices_in_lower_precision(ranks: Any, tmp_path: Path, precision: str) -> None:
    (expected,) = ranks(1).run(_mixed_optimizers, [(0, precision)] * 2, tmp_path / "alone")
    for found in ranks(2).run(_mixed_optimizers, [(2, precision), (1, precision)], tmp_path / "ranks"):
        for state, wanted in zip(found, expected, strict=True):
            _compare(state, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MADE)
def test_elementwise_optimizers_are_detected_in_two_steps(name: str) -> None:
    parameters = list(_model().parameters())
    optimizer = MADE[name](parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces the optimizer's `step`
    assert bool(why_not_elementwise(optimizer)) == (name not in ELEMENTWISE)
    assert bool(why_not_by_parameter(optimizer)) == (name in TOGETHER)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert schedule.last_epoch == 0
    assert not any("step" in state and float(state["step"]) for state in optimizer.state.values())


@pytest.mark.parametrize("rate", [0.0, 1e-6])
@pytest.mark.parametrize("name", MADE)
def test_detection_does_not_depend_on_the_learning_rate(name: str, rate: float) -> None:
    optimizer = MADE[name](list(_model().parameters()))
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(rate) if isinstance(group["lr"], Tensor) else rate
    assert bool(why_not_elementwise(optimizer)) == (name not in ELEMENTWISE)
    assert bool(why_not_by_parameter(optimizer)) == (name in TOGETHER)
    assert all(group["lr"] == torch.tensor(rate) for group in optimizer.param_groups)


def _two_optimizers(rank: int, size: int, zero: int) -> tuple[list[float], list[int]]:
    """Train in fp16 with a step that overflows: each step counts once, for any number of optimizers."""
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
    """A model with bf16 weights gets master weights, in which small updates add up."""
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
    """Two optimizers take turns, like those of a generator and its critic; each clears its own gradients."""
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


@pytest.mark.parametrize(("zero", "backend"), STAGES_AND_BACKENDS)
def test_alternating_optimizers(ranks: Any, zero: int, backend: str) -> None:
    (expected,) = ranks(1).run(_alternate, None)
    for result in ranks(2, backend).run(_alternate, zero):
        _compare(result, expected, rtol=1e-4, atol=1e-6)
