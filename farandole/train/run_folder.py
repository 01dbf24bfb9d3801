"""Manage the folder of a run, `OUT/NAME-DATE-TIME`, and its checkpoints.  This module does not import torch.

    runs/stdlib-20260102-030405/
        config.toml  metrics.jsonl  samples.jsonl  tensorboard/  loss.png  sample.txt
        trace.json               with `profile`: the trace of the first steps
        base/                    for a model folder: its configuration and tokenizer files
        model/                   for a model folder: the trained model
        checkpoints/step-000100/
            train.json           step, samples consumed, ranks, precision and configuration, as JSON
            state/               written by `engine.save`: weights, optimizer, loss scale, random generators
            model.safetensors    parameters and buffers, in the model's dtypes
            tokenizer.json       for text tasks
            adapter/             with LoRA: the adapters in PEFT's format

A checkpoint is renamed to its final name once all of its files are on disk, so a folder with this name is complete
unless files were deleted later.  Only one job at a time may train in a folder, because two jobs would delete each
other's checkpoints.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from farandole._troubleshooting import see
from farandole.data.wording import disk_failure
from farandole.parallel.checkpoint.errors import CheckpointError
from farandole.plan import Precision

if TYPE_CHECKING:
    from farandole.comm.communicator import Communicator
    from farandole.train.config import TrainConfig

STATE, WEIGHTS, METADATA, TOKENIZER = "state", "model.safetensors", "train.json", "tokenizer.json"
ADAPTER, BASE, MODEL, TRACE, LOSS_CURVE = "adapter", "base", "model", "trace.json", "loss.png"
STATE_INDEX = "state/.metadata"
LOCK = ".lock"


# ---- runs ----


def check_out(config: TrainConfig) -> None:
    """Raise `ConfigError` if this process cannot create the folder of a run.

    The check creates and removes a temporary folder.
    """
    # imported here, because a server reads checkpoints but no configurations
    from farandole.train.config import ConfigError

    out = Path(config.out).expanduser()
    existing = next(path for path in [out, *out.parents] if os.path.exists(path))
    if not existing.is_dir():
        raise ConfigError(f"out={config.out}: {existing} is a file; choose another folder with out=FOLDER")
    # permissions are not sufficient: root ignores them, and some file systems allow no new folders
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".run-", dir=existing))
    except OSError as error:
        why = disk_failure(OSError(error.errno, error.strerror), existing)
        raise ConfigError(
            f"out={config.out}: cannot create a folder in {existing}: {why}; choose another folder with out=FOLDER"
        ) from None


def new_run(config: TrainConfig) -> Path:
    """Create a new run's folder and write its configuration.  Raises `ConfigError`."""
    from farandole.train.config import ConfigError

    check_out(config)
    out = Path(config.out).expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
        run = new_folder(out, f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            (run / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        except OSError:
            (run / "config.toml").unlink(missing_ok=True)
            run.rmdir()
            raise
    except OSError as error:
        raise ConfigError(
            f"out={config.out}: cannot create a run: {disk_failure(error, out)}; choose another folder with out=FOLDER"
        ) from None
    return run


def new_folder(parent: Path, name: str) -> Path:
    """Create folder `name` in `parent`, or `name-1`, `name-2` and so on if the name is taken."""
    for attempt in count():
        folder = parent / (f"{name}-{attempt}" if attempt else name)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def newest_checkpoint(path: Path) -> Path:
    """Return the newest checkpoint in a run or in a folder of runs.  Raises `CheckpointError`.

    If `path` is a checkpoint, return `path`.
    """
    named = _named_checkpoint(path)
    if named is not None:
        return named
    found = [checkpoints(run)[-1] for run in _runs(path) if checkpoints(run)]
    if not found:
        raise CheckpointError(_no_checkpoint(path))
    return max(found, key=lambda checkpoint: checkpoint.stat().st_mtime)


def weights_file(config: TrainConfig) -> Path | None:
    """Return the safetensors file that the key `weights` specifies, or None.  Raises `CheckpointError`."""
    if not config.weights:
        return None
    path = Path(config.weights).expanduser()
    return (
        path if path.suffix == ".safetensors" and os.path.isfile(path) else newest_checkpoint(path) / WEIGHTS
    )


def tokenizer_file(config: TrainConfig) -> Path | None:
    """Return the tokenizer file of the initial weights, or None if there is no such file."""
    file = weights_file(config)
    tokenizer = None if file is None else file.with_name(TOKENIZER)
    return tokenizer if tokenizer is not None and tokenizer.is_file() else None


def checkpoint_to_resume(path: Path) -> Path:
    """Return the checkpoint to resume from.

    `path` is a checkpoint, a run or a folder of runs.  For a run, the result is its newest checkpoint.  For a folder of
    runs, the result is the newest checkpoint of the most recently written run.

    Raises:
        CheckpointError: if no checkpoint is found, or if the most recently written run has no checkpoint.
    """
    named = _named_checkpoint(path)
    if named is not None:
        return named
    runs = sorted(_runs(path), key=_last_written)
    if not runs:
        raise CheckpointError(_no_checkpoint(path))
    if saved := checkpoints(runs[-1]):
        return saved[-1]
    # an older run is not resumed automatically, because resuming a run changes it
    older = [run for run in runs if checkpoints(run)]
    advice = f"to resume an older run, use --resume {older[-1]}" if older else "no other run has a checkpoint"
    raise CheckpointError(f"the last run, {runs[-1]}, ended before its first checkpoint; {advice}")


def _named_checkpoint(path: Path) -> Path | None:
    """Return `path` if it is a checkpoint, the newest checkpoint if it is a run, or None if it is a folder of runs."""
    path = path.expanduser()
    if not os.path.isdir(path):  # unlike Path.is_dir, returns False for a name that is too long
        what = "is not a folder" if os.path.exists(path) else "does not exist"
        near = difflib.get_close_matches(path.name, _names(path.parent), n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise CheckpointError(f"{path} {what}: expected a checkpoint, a run, or a folder of runs{hint}")
    if os.path.exists(path / METADATA):
        return path
    if not _is_run(path):
        return None
    if found := checkpoints(path):
        return found[-1]
    raise CheckpointError(f"run {path} ended before its first checkpoint: start a new run")


def _runs(path: Path) -> list[Path]:
    """Return the runs in folder `path`, without folders that cannot be read.  Raises `CheckpointError`."""
    return [folder for folder in _entries(path) if _is_run(folder)]


def _is_run(folder: Path) -> bool:
    # unlike the methods of Path, these functions return False for a folder that cannot be read
    has_files = os.path.isfile(folder / "config.toml") or os.path.isdir(folder / "checkpoints")
    return has_files and os.access(folder, os.R_OK)


def _last_written(run: Path) -> float:
    """Return the time of a run's last write, in seconds since the epoch."""
    times = [run.lstat().st_mtime]
    for entry in _entries(run):
        with suppress(OSError):  # deleted by a running job
            times.append(entry.lstat().st_mtime)
    return max(times)


def _no_checkpoint(path: Path) -> str:
    found = ", ".join(_names(path)[:8]) or "nothing"
    return f"no checkpoint in {path} or in a run in this folder; found: {found}"


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder)) if os.path.isdir(folder.expanduser()) else []


def _entries(folder: Path) -> list[Path]:
    """Return the files and folders in `folder`.  Raises `CheckpointError` if `folder` cannot be read."""
    try:
        return list(folder.expanduser().iterdir())
    except OSError as error:
        raise CheckpointError(
            f"cannot read folder {folder}: {error.strerror}; choose a readable run or folder of runs"
        ) from None


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
    """The plan with which the checkpoint was written, for information only.  Any plan can load the checkpoint."""
    files: list[str] = field(default_factory=lambda: [TOKENIZER])
    """The names of the task's files in the checkpoint."""
    loss_scale: float | None = None
    """Earlier versions wrote this field and the next two fields instead of `state/engine.json`."""
    good_steps: int = 0
    rounding_steps: int = 0


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of checkpoint `folder`.  Raises `CheckpointError` if it cannot be read."""
    try:
        return Metadata(**json.loads((folder / METADATA).read_text()))
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint: cannot read {METADATA} ({error.strerror}); choose a folder RUN/checkpoints/step-N"
        ) from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder}: {METADATA} is damaged: {error}; use another checkpoint{see('is-damaged')}"
        ) from None


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    named = (path for path in found if path.name.removeprefix("step-").isdecimal())
    return sorted((path for path in named if os.path.isdir(path)), key=step_of)


def check_complete(folder: Path) -> None:
    """Raise `CheckpointError` if a file of checkpoint `folder` is missing or truncated."""
    files = read_metadata(folder).files if (folder / METADATA).is_file() else []
    missing = [name for name in (METADATA, STATE_INDEX, WEIGHTS, *files) if not (folder / name).is_file()]
    if missing:
        raise damaged_error(folder, f"it does not contain {', '.join(missing)}")
    found, expected = (folder / WEIGHTS).stat().st_size, _length_of_safetensors(folder / WEIGHTS)
    if found != expected:
        problem = f"its header requires {expected}" if expected else "its header is truncated or damaged"
        raise damaged_error(folder, f"{WEIGHTS} has {found} bytes, but {problem}")


def has_results(checkpoint: Path) -> bool:
    """Return whether the run has written its model and its loss curve after `checkpoint`."""
    run = checkpoint.parent.parent
    curve = run / LOSS_CURVE  # written after the model
    if not os.path.isfile(curve) or (os.path.isdir(run / BASE) and not os.path.isdir(run / MODEL)):
        return False
    return curve.stat().st_mtime >= (checkpoint / METADATA).stat().st_mtime


def damaged_error(folder: Path, why: str) -> CheckpointError:
    """Return the error for a damaged checkpoint.  The message suggests the previous checkpoint."""
    before = [path for path in checkpoints(folder.parent.parent) if step_of(path) < step_of(folder)]
    advice = f"; to resume from the previous checkpoint, use --resume {before[-1]}" if before else ""
    return CheckpointError(f"checkpoint {folder} is damaged: {why}{advice}{see('is-damaged')}")


def _length_of_safetensors(path: Path) -> int:
    """Return the file length that a safetensors header implies, or 0 if the header is damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if length < path.stat().st_size else {}
        except ValueError:
            return 0
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0) if header else 0


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint for `step`."""
    return f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Return the step number in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


# ---- one job at a time, and full disks ----


class RunLock:
    """A lock on a run, held by rank 0 during training.  The kernel releases the lock when the process ends.

    Args:
        newest: the newest checkpoint of the run when the job was checked, or None if the job does not depend on it.

    Raises:
        CheckpointError: on all ranks, if another job holds the lock or has changed the newest checkpoint.
    """

    def __init__(self, run: Path, comm: Communicator, newest: Path | None = None) -> None:
        self._run, self._comm, self._newest = run, comm, newest
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        """Acquire the lock.  Collective call."""
        refusal = self._comm.broadcast_object(self._acquire() if self._comm.rank == 0 else "")
        if refusal:
            raise CheckpointError(refusal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()

    def _acquire(self) -> str:
        """Acquire the lock.  Return the reason for a failure, or ""."""
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
            return f"{self._run} is in use by {holder}: wait until it ends, or stop it, then use --resume"
        if self._newest is not None and (found := checkpoints(self._run)[-1:]) != [self._newest]:
            file.close()
            now = f"is now {found[0].name}" if found else "was deleted"
            return (
                f"another job has trained in {self._run}: its newest checkpoint was {self._newest.name} when this job "
                f"started, and {now}; run the command again"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {gethostname()}")
        file.flush()
        self._file = file
        return ""


class DiskError(RuntimeError):
    """Raised if a run's file cannot be written.  The message names the file and the reason."""
