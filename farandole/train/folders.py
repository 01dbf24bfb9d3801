"""The folders of runs: `OUT/NAME-DATE-TIME`, never one that exists.

runs/stdlib-20260102-030405/
    config.toml  metrics.jsonl  tensorboard/  checkpoints/step-000100/  loss.png  sample.txt
"""

from __future__ import annotations

import difflib
import time
from itertools import count
from pathlib import Path

from farandole.train.checkpoint_folder import FACTS, CheckpointError, checkpoints
from farandole.train.config import ConfigError, TrainConfig
from farandole.train.disk import reason


def new_run(config: TrainConfig) -> Path:
    """Make the folder of a new run, with its configuration in it.  Raises `ConfigError`."""
    out = Path(config.out).expanduser()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={config.out} is a file, not a folder for runs")
    try:
        out.mkdir(parents=True, exist_ok=True)
        run = new_folder(out, f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            (run / "config.toml").write_text(config.to_toml())
        except OSError:
            (run / "config.toml").unlink(missing_ok=True)
            run.rmdir()
            raise
    except OSError as error:
        why = reason(error, next(folder for folder in [out, *out.absolute().parents] if folder.is_dir()))
        raise ConfigError(f"cannot make the folder of a run in out={config.out}: {why}") from None
    return run


def new_folder(parent: Path, name: str) -> Path:
    """Make a folder `name` in `parent`, or `name-1`, `name-2`, ... where that exists."""
    for attempt in count():
        folder = parent / (f"{name}-{attempt}" if attempt else name)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")


def newest_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means to a reader: itself, or the newest of a run, or of a folder of runs.

    Raises `CheckpointError`, naming what is there instead.
    """
    named = _named(path)
    if named is not None:
        return named
    found = [checkpoints(run)[-1] for run in _runs(path) if checkpoints(run)]
    if not found:
        raise CheckpointError(_nothing(path))
    return max(found, key=lambda checkpoint: checkpoint.stat().st_mtime)


def checkpoint_to_resume(path: Path) -> Path:
    """The checkpoint to go on from: `path` itself, or the newest of a run, or of the last run in a folder.

    The last run is the one that was written to last.  Where it has no checkpoint, an older run is named and
    not taken: going on changes it.  Raises `CheckpointError`.
    """
    named = _named(path)
    if named is not None:
        return named
    runs = sorted(_runs(path), key=_last_written)
    if not runs:
        raise CheckpointError(_nothing(path))
    if saved := checkpoints(runs[-1]):
        return saved[-1]
    older = [run for run in runs if checkpoints(run)]
    advice = f"the last run that has one: --resume {older[-1]}" if older else "no other run has one either"
    raise CheckpointError(f"the last run, {runs[-1]}, ended before its first checkpoint; {advice}")


def _named(path: Path) -> Path | None:
    """The checkpoint that `path` is, or the newest of the run that it is; None where it is a folder of runs."""
    path = path.expanduser()
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "is not there"
        near = difflib.get_close_matches(path.name, _inside(path.parent), n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise CheckpointError(f"{path} {what}: name a checkpoint, a run, or a folder of runs{hint}")
    if (path / FACTS).exists():
        return path
    if not _is_run(path):
        return None
    if found := checkpoints(path):
        return found[-1]
    raise CheckpointError(f"run {path} ended before its first checkpoint: start it anew")


def _runs(path: Path) -> list[Path]:
    return [folder for folder in path.expanduser().iterdir() if _is_run(folder)]


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() or (folder / "checkpoints").is_dir()


def _last_written(run: Path) -> float:
    """When a run last wrote something, in seconds since the epoch: it does so at every step."""
    return max(entry.stat().st_mtime for entry in (run, *run.iterdir()))


def _nothing(path: Path) -> str:
    has = ", ".join(_inside(path)[:8]) or "nothing"
    return f"no checkpoint and no run with one in {path}; it has: {has}"


def _inside(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.expanduser().iterdir()) if folder.is_dir() else []
