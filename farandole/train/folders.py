"""The folders of runs: `OUT/NAME-DATE-TIME`, never one that exists.

runs/stdlib-20260102-030405/
    config.toml  metrics.jsonl  tensorboard/  checkpoints/step-000100/  loss.png  sample.txt
"""

from __future__ import annotations

import time
from pathlib import Path

from farandole.train.checkpoint import CheckpointError, checkpoints
from farandole.train.config import ConfigError, TrainConfig


def new_run(config: TrainConfig) -> Path:
    """Make the folder of a new run, with its configuration in it.  Raises `ConfigError`."""
    out = Path(config.out).expanduser()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        run = out / f"{config.name}-{stamp}{f'-{attempt}' if attempt else ''}"
        try:
            run.mkdir(parents=True)
        except FileExistsError:
            if out.exists() and not out.is_dir():
                raise ConfigError(f"out={config.out} is a file, not a folder for runs") from None
            continue
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder of a run in out={config.out}: {error.strerror}"
            ) from None
        (run / "config.toml").write_text(config.to_toml())
        return run
    raise ConfigError(f"cannot find a free name for a run in out={config.out}")


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest of a run, or of the newest run in a folder.

    Raises `CheckpointError`, naming what is there instead.
    """
    path = path.expanduser()
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder: name a checkpoint, a run, or a folder of runs")
    if (path / "train.json").exists():
        return path
    if (path / "checkpoints").is_dir():
        if found := checkpoints(path):
            return found[-1]
        raise CheckpointError(f"run {path} has no checkpoint yet: start it anew")
    runs = [run for run in path.iterdir() if checkpoints(run)]
    if runs:
        newest = max(runs, key=lambda run: checkpoints(run)[-1].stat().st_mtime)
        return checkpoints(newest)[-1]
    inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(f"no checkpoint and no run with one in {path}; it has: {inside}")
