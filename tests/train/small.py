"""A small run of `farandole train`, in ranks that are already running."""

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
    """Return overrides that name a small text, which is written to `folder`."""
    lines = (f"{n} bottles of beer on the wall, {n} bottles of beer\n" for n in range(2000))
    (folder / "text.txt").write_text("".join(lines))
    return [f"data.path={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"]


def world() -> Communicator:
    """All ranks."""
    assert dist.group.WORLD is not None
    return Communicator(dist.group.WORLD)


def make_trainer(words: list[str], precision: Precision = "fp32") -> Trainer:
    """Return the trainer of the preset `tiny` with overrides."""
    config = load_config("tiny", words)
    return Trainer(config, make_task(config), precision, world(), torch.device("cpu"))
