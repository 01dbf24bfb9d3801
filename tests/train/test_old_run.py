"""A run that version e183dd5 wrote resumes, and gives the losses of that version.

    farandole train tiny name=old steps=6 batch=4 precision=fp32 model.vocabulary=257 model.context=8 model.layers=1
        model.heads=2 model.width=8 model.dropout=0.1 data.path=text.txt data.cache=cache parallel.zero=2
        checkpoint.every=2 checkpoint.keep=3 evaluate.every=0 evaluate.samples=4 log.every=1 log.tensorboard=false
        sample.tokens=0 optimizer.warmup_steps=1

`old_run.tar.gz` contains `text.txt` (60 lines of random words), the run's configuration, the metrics of all 6 steps on
2 ranks, and the checkpoint of step 2.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.train.command import Command, losses

STEPS, SAVED = 6, 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("old_run.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def test_old_run_generates_and_resumes(run: Path) -> None:
    expected = losses(run)
    assert list(expected) == list(range(1, STEPS + 1))
    command = Command(run.parent, "generate", str(run), "--tokens", "5")
    assert command.end() == 0, command.output
    command = Command(run.parent, "train", "--resume", str(run), "plan.tensor=2")
    assert command.end() != 0
    assert "load the checkpoint with tensor=1 and expert=1, save it, and load" in command.output
    command = Command(run.parent, "train", "--resume", str(run), "plan.zero=3")
    assert command.end() == 0, command.output
    found = losses(run)
    assert list(found) == list(expected)
    for step in range(SAVED + 1, STEPS + 1):
        assert found[step] == pytest.approx(expected[step], rel=1e-6), step
