"""Checkpoints: everything a run needs to go on as if it had not stopped.

The state is copied in memory and written by a thread while training goes on; `run_folder` says what is written.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from farandole.comm.communicator import Communicator
from farandole.data.cache import flush
from farandole.data.wording import disk_failure
from farandole.parallel.checkpoint.folder import cause_of, copy_of
from farandole.parallel.checkpoint.ranges import LoadPlanner, Range, SavePlanner
from farandole.parallel.checkpoint.state import State, empty_state, load_offloaded, restore, state_of
from farandole.parallel.engine import Engine
from farandole.train.run_folder import (
    METADATA,
    STATE,
    WEIGHTS,
    CheckpointError,
    Metadata,
    checkpoints,
    damaged,
    folder_name,
    new_folder,
    read_metadata,
    step_of,
)
from farandole.train.trainer import Trainer

_ABANDON_S = 3.0
"""How long a failed rank lets a checkpoint be written to its end: the launcher gives it 5.5 seconds."""


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint; its name goes first, so that what has the name is whole at any moment."""
    doomed = checkpoint.with_name(checkpoint.name + ".tmp")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


class CheckpointWriter:
    """Writes the checkpoints of `run`, with copies of `files`, in the background, and keeps the newest `keep`.

    A run that goes on from step `resumed_step` leaves another future behind, if it had been further: those
    checkpoints are set aside, because their steps will be made again.

    `save` and `wait` are called by all ranks.  A failure to write is raised, on all ranks, by the next of
    these calls.
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
        self._files = dict(files)
        self._keep = keep
        self._comm = comm
        # Its own group: the thread's collectives must not mix with those of training.
        self._group = dist.new_group()
        self._bytes = 0  # that this rank writes, about
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved_step = -1 if resumed_step is None else resumed_step
        if comm.rank == 0:
            try:
                self._make_room(resumed_step)
            except OSError as error:
                raise CheckpointError(
                    f"cannot write to {self._folder}: {disk_failure(error, run)}"
                ) from error
        comm.barrier()

    def _make_room(self, resumed_step: int | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_partial()  # of a run that was killed
        later = [path for path in checkpoints(self._run) if step_of(path) > (resumed_step or 0)]
        if resumed_step is None or not later:
            return
        aside = new_folder(self._folder, time.strftime("set-aside-%Y%m%d-%H%M%S"))
        for path in later:
            path.rename(aside / path.name)
        names = ", ".join(path.name for path in later)
        print(f"training goes on from an earlier step; set aside in {aside}: {names}", flush=True)

    def _remove_partial(self) -> None:
        for folder in self._folder.glob("*.tmp"):
            shutil.rmtree(folder)

    def save(self, trainer: Trainer, elapsed_s: float) -> None:
        """Copy the state of `trainer` now; write it while training goes on."""
        self.wait()
        if trainer.step_number == self._saved_step:  # asked to stop before the first step after a checkpoint
            return
        self._saved_step = trainer.step_number
        engine = trainer.engine
        found = state_of(engine, self._comm.rank)
        state = {name: copy_of(value) for name, value in found.items()}
        weights = self._whole_weights(engine, state)
        if self._comm.rank == 0 or engine.zero:  # what ranks hold alike is written by one of them
            self._bytes = sum(part.nbytes for part in (*state.values(), *weights.values()))
        metadata = _metadata(trainer, self._comm.size, elapsed_s, list(self._files))
        self._thread = threading.Thread(
            target=self._write, args=(state, weights, metadata), name="farandole-checkpoint", daemon=True
        )
        self._thread.start()
        if engine.offloaded:  # offloaded state is read by the thread, and changed by the next step
            self.wait()

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk.  Raises `CheckpointError` on all ranks."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failed = torch.tensor([float(self._error is not None)])
        self._comm.all_reduce(failed)
        if failed.item() != 0:
            raise CheckpointError(self._why_failed()) from self._error

    def abandon(self) -> None:
        """Training has failed on this rank: let a write in progress end, and leave nothing half-written."""
        if self._thread is not None:
            self._thread.join(_ABANDON_S)
        if self._comm.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _why_failed(self) -> str:
        """What to say where some rank could not write its part, alike on all ranks; removes what was written."""
        told: list[tuple[OSError | str | None, int]] = [(None, 0)] * self._comm.size
        mine = None if self._error is None else cause_of(self._error)
        dist.all_gather_object(told, (mine, self._bytes), group=self._comm.group)
        said: list[str] = [""]
        if self._comm.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)  # on a disk that fails, this may fail too
            cause = next(cause for cause, _ in told if cause is not None)
            why = disk_failure(cause, self._run, sum(size for _, size in told))
            saved = checkpoints(self._run) if self._folder.is_dir() else []
            kept = f"the last good one is {saved[-1]}" if saved else "there is none before it"
            said[0] = f"cannot write checkpoint {self.newest}: {why}; {kept}"
        dist.broadcast_object_list(said, src=0, group=self._comm.group)
        return said[0]

    @property
    def newest(self) -> Path:
        """The folder of the checkpoint that was saved last."""
        return self._folder / folder_name(self._saved_step)

    @property
    def _partial(self) -> Path:
        return self.newest.with_name(self.newest.name + ".tmp")

    def _whole_weights(self, engine: Engine, state: State) -> dict[str, Tensor]:
        """Copies of all parameters on rank 0, for those who only want to use the model."""
        weights: dict[str, Tensor] = {}
        names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
        for parameter, value in engine.whole_parameters():
            if self._comm.rank != 0:
                continue
            name = names[id(parameter)]
            own = state.get(f"model.{name}")
            held = own.held if isinstance(own, Range) else own
            if held is not None and held.dtype == value.dtype and held.numel() == parameter.numel():
                weights[name] = held.view(parameter.shape)
            else:
                weights[name] = value.to("cpu", copy=True)
        return weights

    def _write(self, state: State, weights: dict[str, Tensor], metadata: Metadata) -> None:
        try:
            writer = FileSystemWriter(self._partial / STATE, sync_files=True)
            dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=self._group)
            if self._comm.rank == 0:  # all ranks' parts are on the disk: the save is a collective call
                self._complete(weights, metadata)
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._error = error

    def _complete(self, weights: dict[str, Tensor], metadata: Metadata) -> None:
        folder = self._partial
        save_file(weights, folder / WEIGHTS)
        for name, path in self._files.items():
            shutil.copyfile(path, folder / name)
        (folder / METADATA).write_text(json.dumps(asdict(metadata), indent=1))
        shutil.copymode(
            folder / METADATA, folder / WEIGHTS
        )  # safetensors makes it readable by its owner only
        for name in (WEIGHTS, *self._files, METADATA, STATE, "."):
            flush(folder / name)
        folder.rename(self.newest)
        flush(self._folder)
        for old in checkpoints(self._run)[: -self._keep]:
            _remove(old)


def load(trainer: Trainer, folder: Path, comm: Communicator) -> Metadata:
    """Bring `trainer` to the state in checkpoint `folder`; all ranks call this together.

    Raises `CheckpointError` where files are missing or damaged.
    """
    metadata, engine = read_metadata(folder), trainer.engine
    try:
        reader = FileSystemReader(folder / STATE)
        wanted = empty_state(engine, comm.rank, reader.read_metadata().state_dict_metadata)
        dcp.load(dict(wanted), storage_reader=reader, planner=LoadPlanner(), process_group=comm.group)
    except CheckpointError as error:  # it is whole, and does not fit
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise damaged(folder, str(cause_of(error))) from error
    restore(engine, comm.rank, wanted)
    load_offloaded(engine, folder / STATE, wanted)
    trainer.step_number = metadata.step
    trainer.sampler.consumed = metadata.consumed
    trainer.scaler.scale, trainer.scaler.good_steps = metadata.loss_scale, metadata.good_steps
    trainer.scaler.steps = metadata.step
    if engine.rounding is not None:
        engine.rounding.steps = metadata.rounding_steps
    return metadata


def _metadata(trainer: Trainer, ranks: int, elapsed_s: float, files: list[str]) -> Metadata:
    plan, rounding = trainer.config.plan, trainer.engine.rounding
    return Metadata(
        step=trainer.step_number,
        consumed=trainer.sampler.consumed,
        ranks=ranks,
        precision=trainer.precision,
        loss_scale=trainer.scaler.scale,
        good_steps=trainer.scaler.good_steps,
        rounding_steps=0 if rounding is None else rounding.steps,
        elapsed_s=elapsed_s,
        config=trainer.config.model_dump(),
        topology={"data": ranks, "zero": plan.zero, "offload": plan.offload},
        files=files,
    )
