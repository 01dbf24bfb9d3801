"""The folder of a run, `OUT/NAME-DATE-TIME`, and the checkpoints in it, for readers without torch.

    runs/stdlib-20260102-030405/
        config.toml  metrics.jsonl  tensorboard/  loss.png  sample.txt
        checkpoints/step-000100/
            train.json           step, samples consumed, ranks, precision, configuration: plain JSON
            state/               of `engine.save`: weights, optimizer, loss scale, random generators of all ranks
            model.safetensors    parameters and buffers, in the types with which the model computes
            tokenizer.json       of tasks with text

A checkpoint gets its name when all its files are on the disk, so a folder with that name is whole, unless a part was deleted
later.  One job at a time trains in a folder: two would delete each other's checkpoints.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from farandole.data.wording import disk_failure
from farandole.parallel.checkpoint.errors import CheckpointError
from farandole.plan import Precision
from farandole.train.config import ConfigError, TrainConfig

if TYPE_CHECKING:
    from farandole.comm.communicator import Communicator

STATE, WEIGHTS, METADATA, TOKENIZER = "state", "model.safetensors", "train.json", "tokenizer.json"
STATE_INDEX = "state/.metadata"
LOCK = ".lock"


# ---- runs ----


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
        why = disk_failure(
            error, next(folder for folder in [out, *out.absolute().parents] if folder.is_dir())
        )
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
    """Return the checkpoint `path`, or the newest one of a run or of a folder of runs.  Raises `CheckpointError`."""
    named = _named(path)
    if named is not None:
        return named
    found = [checkpoints(run)[-1] for run in _runs(path) if checkpoints(run)]
    if not found:
        raise CheckpointError(_nothing(path))
    return max(found, key=lambda checkpoint: checkpoint.stat().st_mtime)


def checkpoint_to_resume(path: Path) -> Path:
    """Return the checkpoint `path`, or the newest one of a run, or of the run in a folder that was written to last.

    If that run has no checkpoint, the error names an older run, but does not use it: to resume a run changes it.

    Raises `CheckpointError`.
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
    """Return the checkpoint `path`, or the newest one of run `path`; None for a folder of runs."""
    path = path.expanduser()
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "is not there"
        near = difflib.get_close_matches(path.name, _inside(path.parent), n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise CheckpointError(f"{path} {what}: name a checkpoint, a run, or a folder of runs{hint}")
    if (path / METADATA).exists():
        return path
    if not _is_run(path):
        return None
    if found := checkpoints(path):
        return found[-1]
    raise CheckpointError(f"run {path} ended before its first checkpoint: start it again")


def _runs(path: Path) -> list[Path]:
    return [folder for folder in path.expanduser().iterdir() if _is_run(folder)]


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() or (folder / "checkpoints").is_dir()


def _last_written(run: Path) -> float:
    """Return when a run last wrote a file, in seconds since the epoch; it writes at every step."""
    return max(entry.stat().st_mtime for entry in (run, *run.iterdir()))


def _nothing(path: Path) -> str:
    has = ", ".join(_inside(path)[:8]) or "nothing"
    return f"no checkpoint and no run with one in {path}; it has: {has}"


def _inside(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.expanduser().iterdir()) if folder.is_dir() else []


# ---- checkpoints ----


@dataclass(frozen=True)
class Metadata:
    """The contents of `train.json`."""

    step: int
    consumed: int
    ranks: int
    precision: Precision
    elapsed_s: float
    config: dict[str, Any]
    topology: dict[str, Any] = field(default_factory=dict)
    """The plan under which it was written, for people: any other plan can load it."""
    files: list[str] = field(default_factory=lambda: [TOKENIZER])
    """The files of the task."""
    loss_scale: float | None = None
    """Of checkpoints of earlier versions, like the next two; `state/engine.json` has them now."""
    good_steps: int = 0
    rounding_steps: int = 0


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of checkpoint `folder`.  Raises `CheckpointError` if it cannot be read."""
    try:
        return Metadata(**json.loads((folder / METADATA).read_text()))
    except OSError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: {METADATA}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: {METADATA} is damaged: {error}") from None


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    return sorted((path for path in found if path.name.removeprefix("step-").isdecimal()), key=step_of)


def check_whole(folder: Path) -> None:
    """Raise `CheckpointError` if a file of checkpoint `folder` is missing or truncated."""
    files = read_metadata(folder).files if (folder / METADATA).is_file() else []
    missing = [name for name in (METADATA, STATE_INDEX, WEIGHTS, *files) if not (folder / name).is_file()]
    if missing:
        raise damaged(folder, f"{', '.join(missing)} missing")
    has, needs = (folder / WEIGHTS).stat().st_size, _length_of_safetensors(folder / WEIGHTS)
    if has != needs:
        raise damaged(folder, f"{WEIGHTS} has {has} bytes, and {needs or 'more'} by its header")


def damaged(folder: Path, why: str) -> CheckpointError:
    """Return the error of a checkpoint that cannot be read; it names the checkpoint before it."""
    before = [path for path in checkpoints(folder.parent.parent) if step_of(path) < step_of(folder)]
    advice = f"; the checkpoint before it: --resume {before[-1]}" if before else ""
    return CheckpointError(f"checkpoint {folder} is damaged: {why}{advice}")


def _length_of_safetensors(path: Path) -> int:
    """Return the length of a file by its header; 0 if that is truncated."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if length < path.stat().st_size else {}
        except ValueError:
            return 0
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0) if header else 0


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


# ---- one job at a time, and full disks ----


class RunLock:
    """A lock on a run, held by rank 0 while its job trains; the system releases it when the process ends.

    Raises:
        CheckpointError: on all ranks, if another job holds it.
    """

    def __init__(self, run: Path, comm: Communicator) -> None:
        self._run, self._comm = run, comm
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        """Acquire it; a collective call."""
        refusal = self._comm.broadcast_object(self._acquire() if self._comm.rank == 0 else "")
        if refusal:
            raise CheckpointError(refusal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it."""
        if self._file is not None:
            self._file.close()

    def _acquire(self) -> str:
        """Return why the lock cannot be acquired, or ""."""
        try:
            file = (self._run / LOCK).open("a+")
        except OSError as error:
            return f"cannot write to {self._run}: {error.strerror}"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            return f"{self._run} is in use: {holder} trains in it; wait until it ends, or stop it, then continue with --resume"
        file.truncate(0)
        file.write(f"process {os.getpid()} on {gethostname()}")
        file.flush()
        self._file = file
        return ""


class DiskError(RuntimeError):
    """A file that a run needs cannot be written; the message says which and why."""
