"""A run on a full disk fails with one line, leaves no partial files, and can be resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.command import Command, only_run


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk with space for one checkpoint of the preset tiny, but not two."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk, on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1300k", "farandole-test", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_is_reported_and_the_run_resumes_with_more_space(tmp_path: Path, disk: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    words = ("data.path=text.txt", "data.cache=cache", "out=disk", "plan.precision=fp32")
    command = Command(tmp_path, "train", "tiny", *words, "steps=10", "checkpoint.every=5")
    assert command.end() == 1, command.output
    run = only_run(disk)
    saved = Path("disk") / run.name / "checkpoints" / "step-000005"
    assert f"{saved.with_name('step-000010')}: no space left on the disk (about " in command.output
    assert (
        f" free); the last good checkpoint is {saved}; see 'farandole explain no-space-left-on-the-disk'\n"
        in command.output
    )
    assert f"step-000005 is saved; to resume: farandole train --resume disk/{run.name}\n" in command.output
    assert "Traceback" not in command.output
    assert not list(disk.rglob("*.tmp"))

    subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
    command = Command(tmp_path, "train", "--resume", "disk", "steps=11", "--ranks", "1")
    assert command.end() == 0, command.output
    assert "resuming after step 5" in command.output


def test_run_without_any_checkpoint_reports_it(tmp_path: Path, disk: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    (disk / "ballast").write_bytes(b"x" * 900_000)
    words = ("data.path=text.txt", "data.cache=cache", "out=disk/runs", "plan.precision=fp32")
    command = Command(tmp_path, "train", "tiny", *words, "steps=5", "checkpoint.every=0", "--ranks", "1")
    assert command.end() == 1, command.output
    run = Path("disk/runs") / only_run(disk / "runs").name
    assert "there is no earlier checkpoint" in command.output
    assert command.output.endswith(
        f"no checkpoint was saved, because run {run} ended before its first checkpoint\n"
    )
