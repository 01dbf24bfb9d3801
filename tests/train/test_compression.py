"""Training with compression between hosts resumes exactly from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from farandole.comm.communicator import Communicator
from farandole.train.checkpoint import CheckpointWriter, load
from farandole.train.config import load_config
from farandole.train.tasks import make_task
from farandole.train.trainer import Trainer
from tests.comm.hosts import hierarchical_group


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer\n" for n in range(2000)))
    return path


def resume(rank: int, size: int, folder: str, compression: str, precision: str) -> None:
    words = [f"data.path={folder}/text.txt", f"data.cache={folder}/cache", "batch=4"]
    config = load_config("tiny", [*words, f"plan.compression={compression}"])
    comm = Communicator(hierarchical_group([0, 1], rank))
    run = Path(folder) / "run"

    def new() -> Trainer:
        return Trainer(config, make_task(config), precision, comm, torch.device("cpu"))

    trainer = new()
    writer = CheckpointWriter(run, trainer.task.files(), 2, comm)
    for _ in range(3):
        trainer.step()
    if trainer.scaler.enabled:
        trainer.engine.rescale(2.0**10 / trainer.scaler.scale)
        trainer.scaler.scale, trainer.scaler.good_steps = 2.0**10, 999  # it doubles after the next step
    writer.save(trainer, 0.0)
    writer.wait()
    expected = [trainer.step().loss for _ in range(4)]
    resumed = new()
    load(resumed, writer.newest, comm)
    assert resumed.engine.compression_state().keys() == trainer.engine.compression_state().keys()
    assert [resumed.step().loss for _ in range(4)] == expected
    assert trainer.scaler.scale == (2.0**11 if precision == "fp16" else 1.0)
    dist.destroy_process_group(comm.group)


@pytest.mark.parametrize(
    ("compression", "precision"), [("int8", "fp32"), ("powersgd", "fp32"), ("topk", "fp16")]
)
def test_resumed_run_has_the_same_losses(ranks, text, compression, precision):
    ranks(2).run(resume, str(text.parent), compression, precision)
