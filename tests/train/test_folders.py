"""The folders of runs: none is taken twice, and the right one is gone on with."""

from __future__ import annotations

import os
import time
from pathlib import Path

from farandole.train.run_folder import checkpoint_to_resume, new_folder, newest_checkpoint


def _run(folder: Path, age_s: float, *steps: int) -> Path:
    """A run that wrote last `age_s` seconds ago, with checkpoints after `steps`."""
    for step in steps:
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").touch()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_a_folder_is_never_taken_twice(tmp_path: Path) -> None:
    made = [new_folder(tmp_path, "set-aside-20260102-030405") for _ in range(3)]
    assert [path.name.removeprefix("set-aside-20260102-030405") for path in made] == ["", "-1", "-2"]


def test_the_run_to_go_on_with_is_the_one_that_wrote_last(tmp_path: Path) -> None:
    first = _run(tmp_path / "b", 200, 5, 10)
    second = _run(tmp_path / "a", 100, 15)
    assert checkpoint_to_resume(tmp_path) == second / "checkpoints" / "step-000015"
    (first / "metrics.jsonl").write_text("")  # it was gone on with since
    assert checkpoint_to_resume(tmp_path) == first / "checkpoints" / "step-000010"


def test_what_is_only_read_is_the_newest_checkpoint_of_any_run(tmp_path: Path) -> None:
    older = _run(tmp_path / "a", 100, 15)
    _run(tmp_path / "b", 10)
    assert newest_checkpoint(tmp_path) == older / "checkpoints" / "step-000015"


def test_folders_that_only_look_like_checkpoints_are_none(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", 10, 15)
    for name in ("step-000020.tmp", "step-000015 (copy)", "step-"):
        (run / "checkpoints" / name).mkdir()
    assert newest_checkpoint(run) == run / "checkpoints" / "step-000015"
