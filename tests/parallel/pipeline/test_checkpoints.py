"""Checkpoints load into any other layout without a change of any bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

import farandole
from farandole.plan import Plan
from tests.parallel.pipeline.models import RATE, batches, build, loss

PLANS: list[tuple[int, Plan]] = [
    (1, Plan()),
    (2, Plan(pipeline=2, zero=1)),
    (4, Plan(pipeline=4, schedule="v-min")),
    (4, Plan(data=2, pipeline=2, schedule="gems", zero=1)),
    (3, Plan(pipeline=3, schedule="gems-w")),
]
TENSOR = (4, Plan(tensor=2, pipeline=2, zero=1, schedule="chimera"))


def _continue(rank: int, size: int, name: str, plan: Plan, source: Path | None, target: Path) -> None:
    """Load a checkpoint, or train one step, and save."""
    model = build(name)
    engine = farandole.parallelize(model, plan)
    engine.optimizer(torch.optim.Adam(model.parameters(), RATE / 50))
    if source is not None:
        engine.load(source)
    else:
        engine.forward_backward(batches(name, 0, engine.mesh.replica_of(rank), 3), loss)
        engine.optimizers[0].step()
        engine.optimizers[0].zero_grad()
    engine.save(target)
    engine.close()


def _contents(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint except the states of random number generators."""
    reader = FileSystemReader(folder)
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if not name.startswith("random.")
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_every_layout_loads_every_other_one(ranks: Any, tmp_path: Path, name: str) -> None:
    offloaded = (2, Plan(pipeline=2, zero=1, offload=f"disk:{tmp_path}"))
    plans = [*PLANS, TENSOR, offloaded, (1, Plan())] if name == "gpt" else PLANS
    first = tmp_path / "first"
    ranks(2).run(_continue, name, Plan(pipeline=2, schedule="zb-h1"), None, first)
    expected, source = _contents(first), first
    assert any(entry.startswith("optimizer.") for entry in expected)
    for number, (size, plan) in enumerate(plans):  # a chain: each layout loads what the previous one saved
        target = tmp_path / str(number)
        ranks(size).run(_continue, name, plan, source, target)
        found = _contents(target)
        assert found.keys() == expected.keys(), plan
        for entry, value in expected.items():
            assert torch.equal(found[entry], value), f"{entry} under {plan}"
        source = target
