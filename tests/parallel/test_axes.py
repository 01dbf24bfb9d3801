"""Every combination of axes gives the losses, gradient norms and weights of one process, and loads the others' checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import farandole
from farandole.plan import Plan
from tests.parallel.plans import build, inputs_of

BATCHES = 4
"""The number of micro-batches in a step, which replicas share."""

COMBINATIONS = [
    ("llama", 4, Plan(data=2, tensor=2)),
    ("llama", 4, Plan(data=2, tensor=2, sequence=True, zero=1)),
    ("llama", 4, Plan(tensor=4, zero=3)),  # 2 key-value heads
    ("llama", 8, Plan(data=2, tensor=4, sequence=True, zero=2)),
    ("llama", 4, Plan(data=2, context=2, zero=2)),
    ("llama", 4, Plan(data=2, context=2, ring=2, zero=3)),
    ("llama", 4, Plan(tensor=2, context=2, ring=2)),
    ("llama", 4, Plan(tensor=2, context=2, sequence=True, zero=1)),
    ("llama", 8, Plan(data=2, tensor=2, context=2, zero=0)),
    ("llama", 8, Plan(data=2, tensor=2, context=2, sequence=True, zero=1)),
    ("llama", 8, Plan(data=2, tensor=2, context=2, sequence=True, zero=2)),
    ("llama", 8, Plan(data=2, tensor=2, context=2, ring=2, zero=3)),
    ("mixtral", 4, Plan(data=2, expert=2, zero=1)),
    ("mixtral", 4, Plan(data=2, expert=2, zero=3)),
    ("mixtral", 4, Plan(tensor=2, expert=2, zero=2)),
    ("mixtral", 4, Plan(context=2, expert=2, zero=0)),
    ("mixtral", 8, Plan(data=2, tensor=2, expert=2, zero=0)),
    ("mixtral", 8, Plan(data=2, tensor=2, expert=2, sequence=True, zero=1)),
    ("mixtral", 8, Plan(data=2, tensor=2, expert=2, zero=2)),
    ("mixtral", 8, Plan(data=2, tensor=2, expert=2, sequence=True, zero=3)),
    ("mixtral", 8, Plan(context=2, tensor=2, expert=2, sequence=True, zero=1)),
    ("deepseek", 8, Plan(context=2, tensor=2, expert=2, sequence=True, zero=2, recompute="block")),
]


def _describe(plan: Plan) -> str:
    fields = ("data", "context", "ring", "expert", "tensor", "sequence", "zero", "recompute")
    return " ".join(f"{n}={v}" for n in fields if (v := getattr(plan, n)) != getattr(Plan(), n))


IDS = [f"{name} {_describe(plan)}" for name, _, plan in COMBINATIONS]


def _steps(
    rank: int, size: int, name: str, plan: Plan, save: Path | None = None, load: Path | None = None
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train for two steps; save after the first one, or load a checkpoint and run the second.

    Returns losses and norms, and the complete weights.
    """
    engine = farandole.parallelize(model := build(name), plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))
    if load is not None:
        engine.load(load)
    found = []
    for step in range(0 if load is None else 1, 2):
        mine = range(BATCHES)[engine.mesh.replica_of(rank) :: engine.mesh.replicas]
        batches = [inputs_of(name, step, number) for number in mine]
        result = engine.forward_backward(
            batches, lambda output, _: output, lambda batch: {"inputs": batch[0], "targets": batch[1]}
        )
        found.append((result.loss, engine.clip(0.3)))
        optimizer.step()
        optimizer.zero_grad()
        if save is not None and step == 0:
            engine.save(save)
    weights = {}
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    for parameter, value in engine.whole_parameters():
        key = names[id(parameter)]
        if rank == 0:
            weights[key] = value.detach().clone()
    engine.close()
    return found, weights


@pytest.mark.parametrize(("name", "size", "plan"), COMBINATIONS, ids=IDS)
def test_axes_train_as_one_process(
    ranks: Any, tmp_path: Path, name: str, size: int, plan: Plan, request: pytest.FixtureRequest
) -> None:
    expected, weights = ranks(1).run(_steps, name, Plan())[0]
    folder = tmp_path / "state"
    results = ranks(size).run(_steps, name, plan, folder)
    for found, _ in results:
        for (loss, norm), (other_loss, other_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(other_loss, rel=1e-5)
            assert norm == pytest.approx(other_norm, rel=1e-4)
    for key, value in results[0][1].items():
        torch.testing.assert_close(
            value, weights[key], rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )
    number = COMBINATIONS.index((name, size, plan))
    others = [(s, p) for n, s, p in COMBINATIONS if n == name and p != plan and s <= 4]
    for other_size, other in [(1, Plan()), *(others[(number + k) % len(others)] for k in range(2) if others)]:
        for found, _ in ranks(other_size).run(_steps, name, other, None, folder):
            assert found[0] == pytest.approx(expected[1], rel=1e-4), other
