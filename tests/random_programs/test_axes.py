"""Random transformers under random plans of all axes give the result of one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import farandole
from farandole import LoRA, Plan, PlanError
from farandole.parallel.lora import add_lora
from tests.random_programs.seeds import seeds
from tests.random_programs.transformers import CAUSAL, EXPERTS, FAMILIES, random_batches, random_transformer

STEPS, CLIP = 2, 0.3
SCHEDULES = ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved", "gems", "chimera", "dualpipe-v"]


@dataclass
class Result:
    """The losses and gradient norms of all steps, the logits of new samples, and the final state."""

    losses: list[float]
    norms: list[float]
    logits: Tensor
    state: dict[str, Tensor]


def random_plan(choose: random.Random, family: str, size: int) -> Plan:
    """Return a plan that divides `size` ranks among random axes."""
    axes = ["data", "tensor", "pipeline", *(["context"] if family in CAUSAL else [])]
    axes += ["expert", "expert"] if family in EXPERTS else []
    while True:
        sizes = dict.fromkeys(axes, 1)
        for factor in choose.choice([[size], [2] * (size // 2)]):
            sizes[choose.choice(axes)] *= factor
        options: dict[str, Any] = {"zero": choose.choice([0, 1, 2, 3])}
        if sizes["pipeline"] > 1:
            options["schedule"] = choose.choice(SCHEDULES)
        if sizes["tensor"] > 1 and family in CAUSAL:
            options["sequence"] = choose.random() < 0.4
        if sizes.get("context", 1) > 1:
            options["ring"] = choose.choice([None, 1, sizes["context"]])
        if choose.random() < 0.3:
            options["recompute"] = choose.choice(["block", "selective"])
        if choose.random() < 0.2:
            options["offload"] = "host"
        try:
            return Plan(**sizes, **options)
        except PlanError:
            continue


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.SGD(trained or parameters, 0.3, momentum=0.9)  # a stage may have no adapters


def alone(family: str, seed: int, replicas: list[int], lora: LoRA | None) -> Result:
    """Train in one process; `replicas` contains the number of replicas in each step."""
    model = random_transformer(family, seed)
    if lora is not None:
        add_lora(model, lora)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(STEPS):
        batches = [
            batch
            for replica in range(replicas[step])
            for batch in random_batches(family, seed, step, replica)
        ]
        parts = [model(*batch) for batch in batches]
        loss = sum(part[0] for part in parts) / sum(part[1] for part in parts)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        logits = model(*random_batches(family, seed, STEPS, 0)[0][:2])
    return Result(losses, norms, logits, model.state_dict())


def parallel(family: str, seed: int, plans: list[Plan], folder: Path) -> tuple[Result, list[int]]:
    """Train each step under its plan, with a checkpoint between different plans; also return the numbers of replicas."""
    losses, norms, replicas = [], [], []
    for step, plan in enumerate(plans):
        with closing(farandole.parallelize(random_transformer(family, seed), plan)) as engine:
            model: nn.Module = engine.model
            optimizer = engine.optimizer(optimizer_of(model))
            if step:
                engine.load(folder / "checkpoint")
            replicas.append(engine.mesh.replicas)
            batches = random_batches(family, seed, step, engine.mesh.replica_of(dist.get_rank()))
            losses.append(
                engine.forward_backward(batches, lambda output, batch: output, lambda batch: batch).loss
            )
            norms.append(engine.clip(CLIP))
            optimizer.step()
            optimizer.zero_grad()
            if step < len(plans) - 1:
                engine.save(folder / "checkpoint")
                continue
            model.eval()
            with torch.no_grad():
                logits = engine(*random_batches(family, seed, STEPS, 0)[0][:2]).clone()
            state = {name: value.clone() for name, value in engine.state_dict().items()}
    return Result(losses, norms, logits, state), replicas


def _compare(rank: int, size: int, seed: int, folder: Path) -> None:
    choose = random.Random(seed)
    family = choose.choice(FAMILIES)
    lora = LoRA(rank=2, targets="all-linear") if choose.random() < 0.25 else None
    for attempt in itertools.count():
        plans = [random_plan(choose, family, size) for _ in range(STEPS)]
        if lora is not None:
            plans = [replace(plan, lora=lora) for plan in plans]
        try:
            found, replicas = parallel(family, seed, plans, folder / str(attempt))
            break
        except PlanError:
            continue  # on all ranks, before the model is divided
    expected = alone(family, seed, replicas, lora)
    close = {"rtol": 1e-3, "atol": 1e-4, "check_dtype": False}
    context = f"{family} {plans}"
    for name in ("losses", "norms", "logits"):
        torch.testing.assert_close(
            getattr(found, name),
            getattr(expected, name),
            msg=lambda why, name=name: f"{context} {name}: {why}",
            **close,
        )
    assert plans[-1].pipeline > 1 or found.state.keys() == expected.state.keys()
    for name, value in found.state.items():
        torch.testing.assert_close(
            value, expected.state[name], msg=lambda why, name=name: f"{context} {name}: {why}", **close
        )


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("size", [2, 4])
def test_one_process(ranks: Callable[..., Any], size: int, seed: int, tmp_path: Path) -> None:
    ranks(size).run(_compare, seed, tmp_path)
