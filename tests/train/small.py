"""Helpers for small `farandole train` runs on the pool's ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from farandole.comm.communicator import Communicator
from farandole.plan import Precision
from farandole.train.config import load_config
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


def make_trainer(words: list[str], precision: Precision = "fp32") -> Trainer:
    """Return a trainer for the preset `tiny` with the overrides `words`."""
    config = load_config("tiny", words)
    return Trainer(config, make_task(config), precision, world(), torch.device("cpu"))
