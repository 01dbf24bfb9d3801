"""Steps that are abandoned after passes within `no_sync` or after a failed pass: the next step has only its own gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole import Plan
from farandole.plan import Precision
from tests.parallel.backends import STAGES_AND_BACKENDS
from tests.parallel.test_data import Failing

RATE = 0.5


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(Failing.apply(torch.tanh(self.first(x))))
        return out


def _model() -> _Net:
    torch.manual_seed(0)
    return _Net()


def _samples(rank: int, number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * rank + number))


def _loss(out: Tensor, share: float = 1.0) -> Tensor:
    return share * out.float().square().mean()


def _expected(
    size: int, numbers: tuple[int, ...], clip: float | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Return the gradient norm and the weights after a step of one process on all ranks' samples."""
    Failing.broken = False
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for rank in range(size):
        for number in numbers:
            _loss(model(_samples(rank, number)), 1 / size / len(numbers)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)
    optimizer.step()
    return norm.item(), model.state_dict()


def _abandon(rank: int, size: int, zero: int, precision: Precision, how: str, clear: str) -> Any:
    """Abandon a step, clear the gradients, and return the norm and the weights after the next step."""
    Failing.broken = False
    model = _model()
    engine = farandole.parallelize(model, Plan(zero=zero, precision=precision))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), RATE))
    if how == "failed":
        Failing.broken = True
        with pytest.raises(ArithmeticError, match="broken"):
            _loss(engine(_samples(rank, 7))).backward()
        Failing.broken = False
    else:
        with engine.no_sync():
            engine.backward(_loss(engine(_samples(rank, 7))))
    if clear == "optimizer":
        optimizer.zero_grad()
    elif clear == "engine":
        engine.zero_grad()
    elif clear == "model":
        model.zero_grad()
    else:
        for parameter in model.parameters():
            parameter.grad = None
    with engine.no_sync():
        engine.backward(_loss(engine(_samples(rank, 0)), 0.5))
    engine.backward(_loss(engine(_samples(rank, 1)), 0.5))
    norm = engine.gradient_norm()
    optimizer.step()
    state = {name: value.float() for name, value in engine.state_dict().items()}
    engine.close()
    return norm, state


@pytest.mark.parametrize("how", ["leftover", "failed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("zero", "backend"), STAGES_AND_BACKENDS)
def test_zero_grad_discards_an_abandoned_step(
    ranks: Any, zero: int, backend: str, precision: Precision, how: str
) -> None:
    norm, state = _expected(2, (0, 1))
    accuracy = 1e-5 if precision == "fp32" else 2e-2
    ways = ["optimizer", "engine"] if how == "failed" else ["optimizer", "engine", "model", "assignment"]
    for clear in ways:
        for found, weights in ranks(2, backend).run(_abandon, zero, precision, how, clear):
            assert found == pytest.approx(norm, rel=accuracy), clear
            for name, value in weights.items():
                torch.testing.assert_close(value, state[name], rtol=accuracy, atol=accuracy)


def _clips_without_a_last_pass(rank: int, size: int, zero: int) -> Any:
    Failing.broken = False
    model = _model()
    engine = farandole.parallelize(model, Plan(zero=zero))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), RATE))
    assert engine.clip(0.01) == 0
    with engine.no_sync():
        engine.backward(_loss(engine(_samples(rank, 0))))
    with pytest.raises(RuntimeError, match=r"engine.gradients: gradients are not averaged yet"):
        engine.gradients()
    with pytest.raises(RuntimeError, match=r"engine.scale_gradients: gradients are not averaged yet"):
        engine.scale_gradients(2.0)
    if zero >= 2:
        with pytest.raises(RuntimeError, match=r"the gradient of first.weight is not averaged yet"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    norm = engine.clip(0.01)
    optimizer.step()
    state = engine.state_dict()
    engine.close()
    return norm, state


@pytest.mark.parametrize(("zero", "backend"), STAGES_AND_BACKENDS)
def test_gradients_without_a_last_pass_are_averaged_and_clipped(ranks: Any, zero: int, backend: str) -> None:
    norm, state = _expected(2, (0,), clip=0.01)
    for found, weights in ranks(2, backend).run(_clips_without_a_last_pass, zero):
        assert found == pytest.approx(norm, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)


def _clears_one_of_two(rank: int, size: int, zero: int) -> dict[str, Tensor]:
    """Clear only the gradients of the last layer after a pass within `no_sync`."""
    Failing.broken = False
    model = _model()
    engine = farandole.parallelize(model, Plan(zero=zero))
    first = engine.optimizer(torch.optim.SGD(model.first.parameters(), RATE))
    last = engine.optimizer(torch.optim.SGD(model.last.parameters(), RATE))
    with engine.no_sync():
        engine.backward(_loss(engine(_samples(rank, 0))))
    last.zero_grad()
    engine.backward(_loss(engine(_samples(rank, 1))))
    first.step()
    last.step()
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize(("zero", "backend"), STAGES_AND_BACKENDS)
def test_one_of_two_optimizers_discards_its_gradients(ranks: Any, zero: int, backend: str) -> None:
    Failing.broken = False
    model = _model()
    for rank in range(2):
        _loss(model(_samples(rank, 0)), 0.5).backward()
    model.last.zero_grad()
    for rank in range(2):
        _loss(model(_samples(rank, 1)), 0.5).backward()
    torch.optim.SGD(model.parameters(), RATE).step()
    for state in ranks(2, backend).run(_clears_one_of_two, zero):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
