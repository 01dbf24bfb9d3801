"""Random numbers under tensor and context parallelism: dropout, and generators in checkpoints."""

from __future__ import annotations

from dataclasses import replace
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


@pytest.mark.parametrize(
    ("name", "recompute"), [("gpt", "none"), ("gpt", "block"), ("llama", "none"), ("deepseek", "block")]
)
def test_context_parallel_ranks_drop_the_elements_of_one_process(
    ranks: Any, name: str, recompute: Any
) -> None:
    """Use 9 positions, so that ranks have different numbers of them, and dropout in blocks, embeddings and adapters."""
    lora = None if name == "gpt" else LoRA(4, 8.0, dropout=0.3)
    (expected,) = ranks(1).run(_dropped, name, Plan(lora=lora))
    for plan in (
        Plan(context=2),
        Plan(context=2, ring=2, zero=3),
        Plan(context=4, ring=4),
        Plan(context=2, tensor=2),
        Plan(context=2, tensor=2, sequence=True),
    ):
        plan = replace(plan, lora=lora, recompute=recompute)
        for found in ranks(plan.ranks_per_sample).run(_dropped, name, plan):
            assert found == pytest.approx(expected, rel=2e-5), plan


def _dropped(rank: int, size: int, name: str, plan: Plan) -> list[float]:
    """Train with dropout outside of attention; return losses and norms."""
    model = build(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    torch.manual_seed(7 + rank)
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5))
    found = []
    for step in range(3):
        batches = [inputs_of(name, step, number) for number in range(2)]
        step_result = engine.forward_backward(
            batches, lambda output, _: output, lambda batch: (batch[0], None, batch[1])
        )
        found += [step_result.loss, engine.clip(0.3)]
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return found


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
    ("plan", "size"),
    [(Plan(), 1), (Plan(tensor=2), 2), (Plan(tensor=2, sequence=True), 2), (Plan(context=2), 2), (Plan(), 2)],
)
def test_a_checkpoint_continues_with_equal_generators(
    ranks: Any, tmp_path: Path, plan: Plan, size: int
) -> None:
    folder = tmp_path / "state"
    first = ranks(size).run(_saved, plan, folder)
    (expected,) = ranks(1).run(_loaded, Plan(), folder)
    if plan.ranks_per_sample == size:
        assert expected == pytest.approx(first[0][1:], rel=1e-5)
    for other in (Plan(tensor=2), Plan(tensor=4, sequence=True), Plan(context=2)):
        for losses in ranks(other.ranks_per_sample).run(_loaded, other, folder):
            assert losses == pytest.approx(expected, rel=1e-5)
