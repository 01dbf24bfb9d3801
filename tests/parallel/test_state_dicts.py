"""States of optimizers that update shards: a rank's own state and a state of one process load; others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import farandole
from farandole import Plan

SAMPLES = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1))
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.05, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, 0.05, foreach=True),
    "named": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "whole parameters": lambda parameters: torch.optim.Adafactor(parameters, 0.05),
}


def _make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 9), nn.Linear(9, 4, bias=False))
    model[2].bias.requires_grad_(False)  # type: ignore[union-attr]
    return model


def _optimizer(name: str, model: nn.Module) -> Optimizer:
    optimizer: Any = OPTIMIZERS[name]
    return optimizer(model.named_parameters() if name == "named" else model.parameters())  # type: ignore[no-any-return]


def _step(model: Any, optimizer: Optimizer, samples: Tensor) -> None:
    model(samples).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _alone(name: str, steps: int) -> tuple[nn.Sequential, Optimizer]:
    model = _make()
    optimizer = _optimizer(name, model)
    for samples in SAMPLES[:steps]:
        _step(model, optimizer, samples)
    return model, optimizer


def _resumed(rank: int, size: int, name: str, plan: Plan, saved: str, folder: str) -> dict[str, Tensor] | str:
    """Return the weights after a run that was interrupted between two steps, or the error of `load_state_dict`."""
    share = 4 // size
    mine = SAMPLES[:, rank * share : (rank + 1) * share]
    model = _make()
    engine = farandole.parallelize(model, Plan(zero=1) if saved == "of zero=1" else plan)
    optimizer = engine.optimizer(_optimizer(name, model))
    for samples in mine[:2]:
        _step(engine, optimizer, samples)
    weights = engine.state_dict()
    torch.save(optimizer.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    state = torch.load(f"{folder}/{0 if saved == 'of rank 0' else rank}.pt")
    if saved == "of one process":
        state = copy.deepcopy(_alone(name, 2)[1].state_dict())
    if saved == "half" and rank == 1:
        state = _alone(name, 2)[1].state_dict()
        state["param_groups"][0]["params"].pop()
    engine.close()
    model = _make(3)
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(_optimizer(name, model))
    model.load_state_dict(weights)
    try:
        optimizer.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.distributed.barrier()
    for samples in mine[2:]:
        _step(engine, optimizer, samples)
    found = engine.state_dict()
    engine.close()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("saved", ["of this rank", "of one process"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_run_goes_on(ranks: Any, name: str, saved: str, zero: int, tmp_path: Path) -> None:
    expected = _alone(name, 4)[0].state_dict()
    backend = "gloo" if zero == 3 else "farandole"
    for found in ranks(2, backend).run(_resumed, name, Plan(zero=zero), saved, str(tmp_path)):
        assert not isinstance(found, str), found
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("saved", "zero", "message"),
    [
        ("of rank 0", 1, "on rank 1: this is the state of other shards, saved by rank 0 of 2"),
        ("of zero=1", 0, "this is the state of other shards, saved by rank . of 2"),
        ("half", 1, "on rank 1: expected parameter groups with .* parameters, got"),
    ],
)
@pytest.mark.parametrize("name", ["fused", "whole parameters"])
def test_another_state_is_refused_on_all_ranks(
    ranks: Any, name: str, saved: str, zero: int, message: str, tmp_path: Path
) -> None:
    for found in ranks(2).run(_resumed, name, Plan(zero=zero), saved, str(tmp_path)):
        assert isinstance(found, str)
        with pytest.raises(RuntimeError, match=rf"{message}.*engine\.load\(folder\)"):
            raise RuntimeError(found)
