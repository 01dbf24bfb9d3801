"""The folders of runs: new folders are unique, and the right checkpoint is found."""

from __future__ import annotations

import os
import time
from pathlib import Path

from farandole.train.run_folder import checkpoint_to_resume, new_folder, newest_checkpoint


def _run(folder: Path, age_s: float, *steps: int) -> Path:
    """Create a run last written `age_s` seconds ago, with checkpoints after `steps`."""
    for step in steps:
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").touch()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_new_folders_are_unique(tmp_path: Path) -> None:
    made = [new_folder(tmp_path, "set-aside-20260102-030405") for _ in range(3)]
    assert [path.name.removeprefix("set-aside-20260102-030405") for path in made] == ["", "-1", "-2"]


def test_resume_uses_the_most_recently_written_run(tmp_path: Path) -> None:
    first = _run(tmp_path / "b", 200, 5, 10)
    second = _run(tmp_path / "a", 100, 15)
    assert checkpoint_to_resume(tmp_path) == second / "checkpoints" / "step-000015"
    (first / "metrics.jsonl").write_text("")  # a more recent write
    assert checkpoint_to_resume(tmp_path) == first / "checkpoints" / "step-000010"


def test_newest_checkpoint_searches_all_runs(tmp_path: Path) -> None:
    older = _run(tmp_path / "a", 100, 15)
    _run(tmp_path / "b", 10)
    assert newest_checkpoint(tmp_path) == older / "checkpoints" / "step-000015"


def test_folders_with_other_names_are_not_checkpoints(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", 10, 15)
    for name in ("step-000020.tmp", "step-000015 (copy)", "step-"):
        (run / "checkpoints" / name).mkdir()
    assert newest_checkpoint(run) == run / "checkpoints" / "step-000015"
