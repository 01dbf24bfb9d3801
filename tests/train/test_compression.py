"""Training with compression between hosts goes on from a checkpoint as if it had not stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from farandole.comm.communicator import Communicator
from farandole.data.text import Text
from farandole.train.checkpoint import CheckpointWriter, load
from farandole.train.config import load_config
from farandole.train.engine import Engine
from farandole.train.text import open_text
from tests.comm.hosts import hierarchical_group


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer\n" for n in range(2000)))
    return path


def resumed(rank: int, size: int, folder: str, compression: str, precision: str) -> None:
    words = [f"data.path={folder}/text.txt", f"data.cache={folder}/cache", "batch=4"]
    config = load_config("tiny", [*words, f"parallel.compression={compression}"])
    text: Text = open_text(config)
    comm = Communicator(hierarchical_group([0, 1], rank))
    run = Path(folder) / "run"

    def new() -> Engine:
        return Engine(config, text, precision, comm, torch.device("cpu"))

    engine = new()
    writer = CheckpointWriter(run, Path(text.folder) / "tokenizer.json", 2, comm)
    for _ in range(3):
        engine.step()
    if engine.scaler.enabled:
        engine.replica.rescale(2.0**10 / engine.scaler.scale)
        engine.scaler.scale, engine.scaler.good_steps = 2.0**10, 999  # it doubles after the next step
    writer.save(engine, 0.0)
    writer.wait()
    expected = [engine.step().loss for _ in range(4)]
    again = new()
    load(again, writer.newest, comm)
    assert again.replica.compression_state().keys() == engine.replica.compression_state().keys()
    assert [again.step().loss for _ in range(4)] == expected
    assert engine.scaler.scale == (2.0**11 if precision == "fp16" else 1.0)
    dist.destroy_process_group(comm.group)


@pytest.mark.parametrize(
    ("compression", "precision"), [("int8", "fp32"), ("powersgd", "fp32"), ("topk", "fp16")]
)
def test_goes_on_with_the_same_losses(ranks, text, compression, precision):
    ranks(2).run(resumed, str(text.parent), compression, precision)
