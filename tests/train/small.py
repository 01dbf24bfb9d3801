"""Helpers for small `farandole train` runs on the pool's ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from farandole.comm.communicator import Communicator
from farandole.launch.runtime import Runtime
from farandole.plan import Precision
from farandole.train.config import load_config
from farandole.train.run import train
from farandole.train.tasks import make_task
from farandole.train.trainer import Trainer


def overrides(folder: Path) -> list[str]:
    """Write a small text to `folder`, and return the overrides for training on this text."""
    lines = (f"{n} bottles of beer on the wall, {n} bottles of beer\n" for n in range(2000))
    (folder / "text.txt").write_text("".join(lines))
    return [f"data.path={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"]


def world() -> Communicator:
    """Return the communicator of all ranks."""
    assert dist.group.WORLD is not None
    return Communicator(dist.group.WORLD)


def make_trainer(words: list[str], precision: Precision = "fp32", preset: str = "tiny") -> Trainer:
    """Return a trainer for a preset with the overrides `words`."""
    config = load_config(preset, words)
    return Trainer(config, make_task(config), precision, world(), torch.device("cpu"))


def train_here(
    rank: int, size: int, words: list[str], run: Path, resume: Path | None = None, is_newest: bool = False
) -> None:
    """Execute a complete run of preset `words[0]` in folder `run` on the pool's ranks."""
    runtime = Runtime(rank, size, rank, size, "host", torch.device("cpu"), "test", world(), _owns_group=False)
    if rank == 0:
        run.mkdir(parents=True, exist_ok=True)
    runtime.comm.barrier()
    train(load_config(words[0], words[1:]), run, resume, runtime, is_newest)
