"""Checkpoints of models with offloaded master weights, as on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole.bench.plan_check import make_trainer
from farandole.comm.communicator import Communicator
from farandole.parallel.zero import weights
from farandole.train.checkpoint import CheckpointWriter, load
from farandole.train.config import load_config
from farandole.train.trainer import Trainer

STEPS = 2


def _make(comm: Communicator, zero: int, offload: str) -> Trainer:
    words = [f"plan.zero={zero}", f"plan.offload={offload}", "batch=4", "model.context=32"]
    return make_trainer(load_config("tiny", words), "fp32", comm, torch.device("cpu"))


def _round_trip(
    rank: int, size: int, run: Path, before: tuple[int, str], after: tuple[int, str]
) -> list[Any]:
    """Save and load with offloaded master weights separate from the weights, as on a CUDA device."""
    assert dist.group.WORLD is not None
    comm = Communicator(dist.group.WORLD)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "is_accelerator", lambda _: True)
        saved = _make(comm, *before)
        if before[1] == "host":
            assert all(shards.weights.master is None for shards in saved.engine.shards_of_buckets)
        for _ in range(STEPS):
            saved.step()
        (run / "tokenizer.json").write_text("{}")
        writer = CheckpointWriter(run, {"tokenizer.json": run / "tokenizer.json"}, 1, comm)
        writer.save(saved, 0.0)
        writer.wait()
        losses = [saved.step().loss for _ in range(2)]
        loaded = _make(comm, *after)
        load(loaded, run / "checkpoints" / f"step-{STEPS:06d}", comm)
        found = [loaded.step().loss for _ in range(2)]
        for trainer in (saved, loaded):
            trainer.engine.close()
    return [losses, found]


@pytest.mark.parametrize(
    ("size", "before", "after"),
    [
        (1, (0, "host"), (0, "host")),
        (1, (0, "host"), (0, "none")),
        (2, (2, "none"), (1, "host")),
        (2, (1, "host"), (2, "none")),
    ],
)
def test_offloaded_weights_are_saved_and_loaded(
    ranks: Any, tmp_path: Path, size: int, before: tuple[int, str], after: tuple[int, str]
) -> None:
    for losses, found in ranks(size).run(_round_trip, tmp_path, before, after):
        assert found == losses
