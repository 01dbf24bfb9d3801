"""The folders of runs: new folders are unique, and the right checkpoint is found."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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


def test_dangling_links_are_skipped(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", 10, 15)
    (run / "latest").symlink_to("missing")
    (run / "checkpoints" / "step-000020").symlink_to("missing")
    (tmp_path / "b").symlink_to("missing")
    for find in (checkpoint_to_resume, newest_checkpoint):
        assert find(tmp_path) == run / "checkpoints" / "step-000015"


FIND_AS_NOBODY = """
import os, sys
from pathlib import Path
from farandole.train.run_folder import CheckpointError, checkpoint_to_resume, newest_checkpoint
if os.geteuid() == 0:
    os.setuid(65534)
for find in (checkpoint_to_resume, newest_checkpoint):
    for path in map(Path, sys.argv[1:]):
        try:
            print(find(path).name)
        except CheckpointError as error:
            print(str(error))
"""


def test_folders_that_cannot_be_read_are_skipped() -> None:
    with tempfile.TemporaryDirectory() as name:  # other users cannot open `tmp_path`
        folder = Path(name)
        folder.chmod(0o755)
        _run(folder / "a", 100, 15)
        closed, unlisted = _run(folder / "b", 10, 20), _run(folder / "c", 10, 25)
        closed.chmod(0)
        unlisted.chmod(0o311)
        command = [sys.executable, "-c", FIND_AS_NOBODY, name, str(closed)]
        found = subprocess.run(command, capture_output=True, text=True)
        closed.chmod(0o755)
        unlisted.chmod(0o755)
    assert found.returncode == 0, found.stderr
    refusal = f"cannot read folder {closed}: Permission denied; choose a readable run or folder of runs"
    names = [line.partition("; see ")[0] for line in found.stdout.splitlines()]
    assert names == ["step-000015", refusal] * 2
