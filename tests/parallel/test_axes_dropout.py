"""Random numbers under tensor parallelism: dropout of adapters, and generators in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import farandole
from farandole.plan import LoRA, Plan
from tests.parallel.plans import alone, build, compare, inputs_of, train


def test_adapters_outside_of_regions_drop_the_same_inputs(ranks: Any) -> None:
    lora = LoRA(4, 8.0, dropout=0.3)
    expected = alone(ranks, "deepseek", Plan(lora=lora))
    for plan in (Plan(tensor=2, lora=lora), Plan(tensor=2, lora=lora, sequence=True)):
        compare(ranks(2).run(train, "deepseek", plan), expected, "deepseek", plan, 2)


def _saved(rank: int, size: int, plan: Plan, folder: Path) -> list[float]:
    """Train for a step with dropout, and save; return the losses of that step and the next one."""
    return _steps(rank, plan, folder, save=True)


def _loaded(rank: int, size: int, plan: Plan, folder: Path) -> list[float]:
    """Load the checkpoint, and return the loss of the next step."""
    return _steps(rank, plan, folder, save=False)


def _steps(rank: int, plan: Plan, folder: Path, *, save: bool) -> list[float]:
    model = build("gpt")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    torch.manual_seed(rank if save else 10 + rank)
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    if not save:
        engine.load(folder)
    losses = []
    for step in range(2) if save else [1]:
        tokens, targets = inputs_of("gpt", step, 0)
        found = engine.forward_backward(
            [(tokens, targets)], lambda output, _: output, lambda batch: (batch[0], None, batch[1])
        )
        losses.append(found.loss)
        optimizer.step()
        optimizer.zero_grad()
        if save and step == 0:
            engine.save(folder)
    engine.close()
    return losses


@pytest.mark.parametrize(
    ("plan", "size"), [(Plan(), 1), (Plan(tensor=2), 2), (Plan(tensor=2, sequence=True), 2), (Plan(), 2)]
)
def test_a_checkpoint_continues_with_equal_generators(
    ranks: Any, tmp_path: Path, plan: Plan, size: int
) -> None:
    folder = tmp_path / "state"
    first = ranks(size).run(_saved, plan, folder)
    (expected,) = ranks(1).run(_loaded, Plan(), folder)
    if plan.tensor == size:
        assert expected == pytest.approx(first[0][1:], rel=1e-5)
    for other in (Plan(tensor=2), Plan(tensor=4, sequence=True)):
        for losses in ranks(other.tensor).run(_loaded, other, folder):
            assert losses == pytest.approx(expected, rel=1e-5)
