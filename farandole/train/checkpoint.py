"""Checkpoints: everything a run needs to go on as if it had not stopped.

A checkpoint is a folder `step-000123`:

    train.json           step, samples consumed, ranks, precision, loss scale, configuration: plain JSON
    state/               torch distributed checkpoint: weights, optimizer, random generators of all ranks
    model.safetensors    the weights alone
    tokenizer.json

The state is copied in memory and written by a thread while training goes on.  A folder gets its name when
all that is in it has been flushed, so that what has the name is whole.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, TensorStorageMetadata

from farandole.comm.communicator import Communicator
from farandole.data.cache import flush
from farandole.train.engine import Engine
from farandole.train.optimizer import restore_state, state_by_name

STATE, WEIGHTS, FACTS, TOKENIZER = "state", "model.safetensors", "train.json", "tokenizer.json"
_NAME = "step-{:06d}"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, or continued from; the message says which and why."""


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says about its run besides tensors."""

    step: int
    consumed: int
    ranks: int
    precision: str
    loss_scale: float
    good_steps: int
    elapsed_s: float
    config: dict[str, Any]


def read_facts(folder: Path) -> Facts:
    """The facts of checkpoint `folder`.  Raises `CheckpointError` where it is not a whole checkpoint."""
    try:
        return Facts(**json.loads((folder / FACTS).read_text()))
    except OSError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: {FACTS}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: {FACTS} is damaged: {error}") from None


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if not path.name.endswith(".tmp")]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """After how many steps a checkpoint was made, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint; its name goes first, so that what has the name is whole at any moment."""
    partial = checkpoint.with_name(checkpoint.name + ".tmp")
    checkpoint.rename(partial)
    shutil.rmtree(partial)


class CheckpointWriter:
    """Writes the checkpoints of `run` in the background, and keeps the newest `keep`.

    A run that goes on from step `resumed_step` leaves another future behind, if it had been further: those
    checkpoints are set aside, because their steps will be made again.

    `save` and `wait` are called by all ranks.  A failure to write is raised, on all ranks, by the next of
    these calls.
    """

    def __init__(
        self, run: Path, tokenizer: Path, keep: int, comm: Communicator, resumed_step: int | None = None
    ) -> None:
        self._folder = run / "checkpoints"
        self._tokenizer = tokenizer
        self._keep = keep
        self._comm = comm
        # Its own group: the thread's collectives must not mix with those of training.
        self._group = dist.new_group()
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved_step = -1 if resumed_step is None else resumed_step
        if comm.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            for partial in self._folder.glob("*.tmp"):  # of a run that was killed
                shutil.rmtree(partial)
            if resumed_step is not None:
                self._set_aside([path for path in checkpoints(run) if step_of(path) > resumed_step])
        comm.barrier()

    def _set_aside(self, later: list[Path]) -> None:
        if not later:
            return
        aside = self._folder / time.strftime("set-aside-%Y%m%d-%H%M%S")
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        names = ", ".join(path.name for path in later)
        print(f"training goes on from an earlier step; set aside in {aside}: {names}", flush=True)

    def save(self, engine: Engine, elapsed_s: float) -> None:
        """Copy the state of `engine` now; write it while training goes on."""
        self.wait()
        if engine.step_number == self._saved_step:  # asked to stop before the first step after a checkpoint
            return
        self._saved_step = engine.step_number
        state = {name: self._copy(name, value) for name, value in _state(engine, self._comm.rank).items()}
        facts = _facts(engine, self._comm.size, elapsed_s)
        self._thread = threading.Thread(
            target=self._write, args=(state, facts), name="farandole-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk.  Raises `CheckpointError` on all ranks."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failed = torch.tensor([float(self._error is not None)])
        self._comm.all_reduce(failed)
        if failed.item() == 0:
            return
        cause = self._error
        reason = f"{type(cause).__name__}: {cause}" if cause else "another rank could not"
        raise CheckpointError(f"cannot write a checkpoint to {self._folder}: {reason}") from cause

    @property
    def newest(self) -> Path:
        """The folder of the checkpoint that was saved last."""
        return self._folder / _NAME.format(self._saved_step)

    def _copy(self, name: str, value: Tensor) -> Tensor:
        """A copy in memory that is kept and used again for the next checkpoint."""
        if name not in self._copies or self._copies[name].shape != value.shape:
            self._copies[name] = torch.empty_like(value, device="cpu")
        return self._copies[name].copy_(value)

    def _write(self, state: dict[str, Tensor], facts: Facts) -> None:
        final = self._folder / _NAME.format(facts.step)
        partial = final.with_name(final.name + ".tmp")
        try:
            writer = FileSystemWriter(partial / STATE, sync_files=True)
            dcp.save(state, storage_writer=writer, process_group=self._group)
            if self._comm.rank == 0:  # all ranks' parts are on the disk: the save is a collective call
                self._complete(state, facts, partial, final)
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._error = error

    def _complete(self, state: dict[str, Tensor], facts: Facts, partial: Path, final: Path) -> None:
        prefix = "model."
        weights = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
        save_file(weights, partial / WEIGHTS)
        shutil.copyfile(self._tokenizer, partial / TOKENIZER)
        (partial / FACTS).write_text(json.dumps(asdict(facts), indent=1))
        shutil.copymode(partial / FACTS, partial / WEIGHTS)  # safetensors makes it readable by its owner only
        for name in (WEIGHTS, TOKENIZER, FACTS, STATE, "."):
            flush(partial / name)
        partial.rename(final)
        flush(self._folder)
        for old in checkpoints(self._folder.parent)[: -self._keep]:
            _remove(old)


def load(engine: Engine, folder: Path, comm: Communicator) -> Facts:
    """Bring `engine` to the state in checkpoint `folder`; all ranks call this together.

    Raises `CheckpointError` where files are missing or damaged.
    """
    facts = read_facts(folder)
    try:
        reader = FileSystemReader(folder / STATE)
        wanted = _state(engine, comm.rank)
        saved = reader.read_metadata().state_dict_metadata
        if f"random.cuda.rank{comm.rank}" not in saved:  # this rank was on a CPU
            wanted.pop(f"random.cuda.rank{comm.rank}", None)
        # The optimizer of a new engine is still empty: make room for what the checkpoint has of it.
        for name, entry in saved.items():
            if name.startswith("optimizer.") and isinstance(entry, TensorStorageMetadata):
                wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load(wanted, storage_reader=reader, process_group=comm.group)
    except Exception as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {error}") from error
    prefix = "optimizer."
    optimizer_state = {n.removeprefix(prefix): t for n, t in wanted.items() if n.startswith(prefix)}
    restore_state(engine.model, engine.optimizer, optimizer_state)
    torch.set_rng_state(wanted[f"random.rank{comm.rank}"])
    if f"random.cuda.rank{comm.rank}" in wanted:
        torch.cuda.set_rng_state(wanted[f"random.cuda.rank{comm.rank}"], engine.device)
    engine.step_number = facts.step
    engine.sampler.consumed = facts.consumed
    engine.scaler.scale, engine.scaler.good_steps = facts.loss_scale, facts.good_steps
    return facts


def _state(engine: Engine, rank: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name; what ranks hold alike has the same name on each."""
    weights = {f"model.{name}": value.detach() for name, value in engine.model.named_parameters()}
    optimizer = {
        f"optimizer.{name}": value for name, value in state_by_name(engine.model, engine.optimizer).items()
    }
    random = {f"random.rank{rank}": torch.get_rng_state()}
    if engine.device.type == "cuda":
        random[f"random.cuda.rank{rank}"] = torch.cuda.get_rng_state(engine.device)
    return weights | optimizer | random


def _facts(engine: Engine, ranks: int, elapsed_s: float) -> Facts:
    return Facts(
        step=engine.step_number,
        consumed=engine.sampler.consumed,
        ranks=ranks,
        precision=engine.precision,
        loss_scale=engine.scaler.scale,
        good_steps=engine.scaler.good_steps,
        elapsed_s=elapsed_s,
        config=engine.config.model_dump(),
    )
