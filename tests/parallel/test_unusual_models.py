"""Models with unusual blocks and parameters train as in one process, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farandole
from farandole import Plan, PlanError
from farandole.plan import Precision
from tests.parallel.backends import STAGES_AND_BACKENDS

WIDTH = 4


class Checkpointed(nn.Module):
    """Recomputes a part of itself."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.last(torch.tanh(self.first(y))), x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Force(nn.Module):
    """Adds the derivative of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(y).square().sum(), y, create_graph=True)
        return x + force


class Spectral(nn.Module):
    """Multiplies the Fourier transform of its input by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.irfft(torch.fft.rfft(self.linear(x).float()) * self.weight, WIDTH)
        return found.to(x.dtype)


class Scaled(nn.Module):
    """Blocks, and a parameter that is used after all blocks."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(5))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Span(Scaled):
    """Recomputes a layer together with all blocks."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.body(torch.tanh(self.first(y))), x, use_reentrant=False) * self.scale


BLOCKS = {
    "checkpointed": Checkpointed,
    "reentrant": Reentrant,
    "span": Checkpointed,
    "force": Force,
    "spectral": Spectral,
}


def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (Span if name == "span" else Scaled)(BLOCKS[name])


def _samples(step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))


def _alone(name: str) -> dict[str, Tensor]:
    model = _build(name)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        model(_samples(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _train(rank: int, size: int, name: str, zero: int, precision: Precision) -> dict[str, Tensor]:
    model = _build(name)
    engine = farandole.parallelize(model, Plan(zero=zero, precision=precision))
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 0.01))
    for step in range(3):
        engine.backward(engine(_samples(step).split(6 // size)[rank]).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("zero", "backend"), STAGES_AND_BACKENDS)
def test_unusual_blocks(ranks: Any, name: str, zero: int, backend: str) -> None:
    expected = _alone(name)
    for state in ranks(2, backend).run(_train, name, zero, "fp32"):
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("zero", [0, 3])
def test_complex_parameters_remain_complex_in_bf16(ranks: Any, zero: int) -> None:
    expected = _alone("spectral")
    for state in ranks(2).run(_train, "spectral", zero, "bf16"):
        for key, value in state.items():
            assert (
                value.is_complex() == key.endswith("weight") and "linear" not in key or not value.is_complex()
            )
            torch.testing.assert_close(value, expected[key], atol=0.02, rtol=0.05)


def _refused(rank: int, size: int) -> str:
    with pytest.raises(PlanError) as caught:
        farandole.parallelize(_build("spectral"), Plan(precision="fp16"))
    return str(caught.value)


def test_complex_parameters_are_refused_in_fp16(ranks: Any) -> None:
    (message,) = ranks(1).run(_refused)
    assert (
        "does not support complex parameters such as blocks.0.weight; nearest plan: precision='bf16'"
        in message
    )


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def _add_passes(rank: int, size: int, zero: int, way: str) -> list[Tensor]:
    """Take two steps of two backward passes each; return all weights."""
    torch.manual_seed(0)
    model = Unused()
    engine = farandole.parallelize(model, Plan(zero=zero))
    # with weight decay, a gradient of zeros is not the same as no gradient
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5))
    for step in range(2):
        loss = engine(_samples(step).split(6 // size)[rank]).square().mean()
        loss.backward(retain_graph=way == "graph")
        if way == "graph":
            loss.backward()
        else:
            engine(_samples(step).split(6 // size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=way != "zeros")
    state = engine.state_dict()
    engine.close()
    return [state[name] for name in ("used.weight", "used.bias", "unused.weight", "unused.bias")]


@pytest.mark.parametrize("way", ["passes", "graph", "zeros"])
@pytest.mark.parametrize("zero", range(4))
def test_a_second_pass_does_not_create_gradients_of_unused_parameters(
    ranks: Any, zero: int, way: str
) -> None:
    torch.manual_seed(0)
    model = Unused()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    for step in range(2):
        (2 * model(_samples(step)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(2).run(_add_passes, zero, way):
        for value, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(value, parameter.detach())
