"""Write and load a run's checkpoints.

`engine.save` writes the state in the background.  Module `run_folder` describes the other files.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open

from farandole.comm.communicator import Communicator
from farandole.comm.notices import warn
from farandole.data.cache import flush
from farandole.data.wording import disk_failure
from farandole.parallel.checkpoint import folder as engine_folder
from farandole.parallel.checkpoint.errors import UnreadableError
from farandole.parallel.checkpoint.folder import PendingSave
from farandole.parallel.checkpoint.safetensors_files import write_weights
from farandole.parallel.lora.peft_adapter import write_adapter
from farandole.plan import MODEL_AXES
from farandole.train.run_folder import (
    ADAPTER,
    METADATA,
    STATE,
    WEIGHTS,
    CheckpointError,
    Metadata,
    checkpoints,
    damaged_error,
    folder_name,
    new_folder,
    read_metadata,
    step_of,
)
from farandole.train.trainer import Trainer

_ABANDON_S = 3.0
"""The maximum time in seconds that a failed rank waits for a pending checkpoint.

The launcher kills all ranks 5.5 s after a failure.
"""


class CheckpointWriter:
    """Writes the checkpoints of `run` in the background, and keeps the newest `keep` checkpoints.

    Each checkpoint contains copies of `files`.  When a run resumes from step `resumed_step`, the checkpoints of
    later steps are moved to another folder.

    `save` and `wait` are collective calls.

    Raises:
        CheckpointError: on all ranks, if a checkpoint cannot be written.  The next `save` or `wait` raises the error.
    """

    def __init__(
        self,
        run: Path,
        files: Mapping[str, Path],
        keep: int,
        comm: Communicator,
        resumed_step: int | None = None,
    ) -> None:
        self._run = run
        self._folder = run / "checkpoints"
        self._names = list(files)
        self._contents: dict[str, bytes] = {}
        self._keep = keep
        self._comm = comm
        self._weight_bytes = 0
        self._pending: PendingSave | None = None
        self._saved_step = -1 if resumed_step is None else resumed_step
        if comm.rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                for partial in self._folder.glob("*.tmp"):  # left behind by a killed run
                    shutil.rmtree(partial)
                if resumed_step is not None:
                    self._set_aside(resumed_step)
            except OSError as error:
                raise CheckpointError(
                    f"cannot write to {self._folder}: {disk_failure(error, run)}"
                ) from error
            try:  # read now, because a cache or a folder may be deleted during the run
                self._contents = {name: path.read_bytes() for name, path in files.items()}
            except OSError as error:
                raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
        comm.barrier()

    def _set_aside(self, step: int) -> None:
        later = [path for path in checkpoints(self._run) if step_of(path) > step]
        if later:
            aside = new_folder(self._folder, time.strftime("set-aside-%Y%m%d-%H%M%S"))
            for path in later:
                path.rename(aside / path.name)
            names = ", ".join(path.name for path in later)
            warn(f"resuming from an earlier step: moved later checkpoints {names} to {aside}")

    @property
    def newest(self) -> Path:
        """Return the folder of the newest checkpoint, which may still be incomplete."""
        return self._folder / folder_name(self._saved_step)

    @property
    def _partial(self) -> Path:
        return self.newest.with_name(f"{self.newest.name}.tmp")

    def save(self, trainer: Trainer, elapsed_s: float) -> None:
        """Copy the state of `trainer`, and write the copy in the background."""
        self.wait()
        if trainer.step_number == self._saved_step:  # stopped right after a checkpoint
            return
        self._saved_step = trainer.step_number
        self._weight_bytes = sum(t.nbytes for t in (*trainer.model.parameters(), *trainer.model.buffers()))
        text = json.dumps(asdict(_metadata(trainer, self._comm.size, elapsed_s, self._names)), indent=1)
        own = {
            name: t.dtype for name, t in (*trainer.model.named_parameters(), *trainer.model.named_buffers())
        }
        types = {name: dtype for each in self._comm.all_gather_object(own) for name, dtype in each.items()}
        with self._explained():
            self._pending = trainer.engine.save(
                self._partial / STATE,
                asynchronous=True,
                on_saved=lambda: self._complete(trainer, text, types),
            )

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._explained():
                pending.wait()

    def abandon(self) -> None:
        """After a failure on this rank, wait briefly for a pending write, and remove any partial checkpoint."""
        if self._pending is not None:
            self._pending.join(_ABANDON_S)
        if self._comm.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _complete(self, trainer: Trainer, metadata: str, types: Mapping[str, torch.dtype]) -> None:
        """Write the remaining files, rename the checkpoint to its final name, and delete old checkpoints."""
        folder = self._partial
        write_weights(folder / WEIGHTS, folder / STATE, types)
        if (
            trainer.config.plan.lora_rank
        ):  # read the file, because the model changes during training and may be sharded
            adapter = trainer.engine.adapter
            with safe_open(folder / WEIGHTS, "pt") as file:
                values = {name: file.get_tensor(name) for name in adapter.tensors}
            base = trainer.config.weights or trainer.config.model.folder or None
            write_adapter(adapter, values, folder / ADAPTER, base)
        for name, content in self._contents.items():
            (folder / name).write_bytes(content)
        (folder / METADATA).write_text(metadata)
        for name in (WEIGHTS, *self._names, METADATA, STATE, "."):
            flush(folder / name)
        folder.rename(self.newest)
        flush(self._folder)
        for old in checkpoints(self._run)[
            : -self._keep
        ]:  # rename the new checkpoint before deleting old ones
            shutil.rmtree(old.rename(old.with_name(f"{old.name}.tmp")))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Return a context manager that cleans up after a failed save and raises an error on all ranks."""
        try:
            yield
        except CheckpointError as error:
            message = ""
            if self._comm.rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)  # removal may also fail on a failing disk
                why = disk_failure(error.reason, self._run, error.nbytes + self._weight_bytes)
                saved = checkpoints(self._run)
                kept = (
                    f"the last good checkpoint is {saved[-1]}" if saved else "there is no earlier checkpoint"
                )
                message = f"cannot write checkpoint {self.newest}: {why}; {kept}"
            raise CheckpointError(self._comm.broadcast_object(message)) from error


def load(trainer: Trainer, folder: Path, comm: Communicator) -> Metadata:
    """Restore `trainer` from checkpoint `folder`, and return the checkpoint's metadata.  Collective call.

    Raises:
        CheckpointError: if files are missing or damaged, or belong to another model.
    """
    metadata, engine = read_metadata(folder), trainer.engine
    own = None
    if metadata.loss_scale is not None:  # an earlier version wrote this checkpoint, without engine.json
        scaler = {"scale": metadata.loss_scale, "good_steps": metadata.good_steps, "steps": metadata.step}
        own = engine.metadata() | {
            "scaler": {**engine.scaler.state_dict(), **scaler, "enabled": True},
            "rounding_steps": metadata.rounding_steps,
            "extra": {},
        }
    try:
        engine_folder.load(engine, folder / STATE, own)
    except UnreadableError as error:
        raise damaged_error(folder, str(error.reason)) from error
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.reason}") from error
    trainer.step_number = metadata.step
    trainer.sampler.consumed = metadata.consumed
    return metadata


def _metadata(trainer: Trainer, ranks: int, elapsed_s: float, files: list[str]) -> Metadata:
    plan, mesh = trainer.config.plan, trainer.engine.mesh
    axes = {axis: mesh.width(axis) for axis in ("pipeline", *MODEL_AXES) if mesh.width(axis) > 1}
    return Metadata(
        step=trainer.step_number,
        consumed=trainer.sampler.consumed,
        ranks=ranks,
        precision=trainer.precision,
        elapsed_s=elapsed_s,
        config=trainer.config.model_dump(),
        topology={"data": mesh.width("data"), **axes, "zero": plan.zero, "offload": plan.offload},
        files=files,
    )
