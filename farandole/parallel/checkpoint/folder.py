"""Checkpoints of an engine in a folder: saved at once or in the background, loaded under any plan by any number of ranks.

    engine.save(folder, extra={"step": n})            # `engine_state` says what is in it
    pending = engine.save(folder, asynchronous=True)  # copies the state to host memory, and writes it while training goes on
    pending.wait()
    engine.load(folder)
    engine.export(folder)                             # model.safetensors: parameters and buffers alone, for other tools
    engine.load_weights(folder)

A folder gets its name when all is in it and on the disk; before that it is called `FOLDER.tmp`.
"""

from __future__ import annotations

import json
import shutil
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from farandole.comm.communicator import Communicator
from farandole.comm.fallback import local_group
from farandole.parallel.checkpoint.errors import CheckpointError
from farandole.parallel.checkpoint.ranges import LoadPlanner, Range, SavePlanner
from farandole.parallel.checkpoint.state import State, empty_state, load_offloaded, restore, state_of

if TYPE_CHECKING:
    from farandole.parallel.engine import Engine

METADATA = "engine.json"
_VERSION = 1


class PendingSave:
    """A checkpoint that is being written to `folder`."""

    def __init__(
        self, folder: Path, comm: Communicator, state: State, text: str, *, background: bool
    ) -> None:
        self.folder = folder
        self._comm, self._state, self._text = comm, state, text
        self._refusal = ""
        self._thread: threading.Thread | None = None
        if background:
            group = _background_group(comm)
            self._thread = threading.Thread(
                target=self._write, args=(group,), name="farandole-checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._write(comm.group)

    @property
    def done(self) -> bool:
        """Whether this rank has ended its part; `wait` tells whether it has succeeded."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is on the disk; all ranks call it.

        Raises:
            CheckpointError: on all ranks, if one of them could not write its part.
        """
        if self._thread is not None:
            self._thread.join()
        agree(self._comm, self._refusal, self.folder)

    def _write(self, group: dist.ProcessGroup) -> None:
        partial = partial_folder(self.folder)
        try:
            writer = FileSystemWriter(partial, sync_files=True)
            dcp.save(dict(self._state), storage_writer=writer, planner=SavePlanner(), process_group=group)
            if self._comm.rank == 0:  # all ranks' parts are on the disk: the save is a collective call
                (partial / METADATA).write_text(self._text)
                partial.rename(self.folder)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            self._refusal = str(cause_of(error))
            if self._comm.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
        self._state = {}  # copies of the whole state: memory for training


_background_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def _background_group(comm: Communicator) -> dist.ProcessGroup:
    """A group of the same ranks: calls of the thread must not mix with those of training."""
    if comm.group not in _background_groups:
        ranks = [dist.get_global_rank(comm.group, rank) for rank in range(comm.size)]
        _background_groups[comm.group] = local_group(comm.group, ranks)
    return _background_groups[comm.group]


def save(engine: Engine, folder: Path, extra: Mapping[str, Any], *, background: bool) -> PendingSave:
    """See `Engine.save`."""
    comm, text, refusal = engine.comm, "", ""
    try:
        text = json.dumps({"version": _VERSION, **engine.metadata(), "extra": dict(extra)}, indent=1)
    except TypeError as error:
        refusal = f"extra cannot be written as JSON: {error}"
    if comm.rank == 0 and not refusal:
        refusal = prepare(folder)
    agree(comm, refusal, folder)
    state = state_of(engine, comm.rank)
    if background:
        state = {name: copy_of(value) for name, value in state.items()}
    pending = PendingSave(folder, comm, state, text, background=background)
    # the next step changes what is kept elsewhere
    if not background or any(isinstance(each, Range) and each.held is None for each in state.values()):
        pending.wait()
    return pending


def copy_of(value: Tensor | Range) -> Tensor | Range:
    """A copy in host memory; offloaded states are read when they are written."""
    if isinstance(value, Range):
        return value if value.held is None else replace(value, held=value.held.to("cpu", copy=True))
    return value.detach().to("cpu", copy=True)


def load(engine: Engine, folder: Path) -> dict[str, Any]:
    """See `Engine.load`."""
    comm, metadata, loaded, refusal = engine.comm, {}, State(), ""
    try:
        metadata = json.loads((folder / METADATA).read_text())
        reader = FileSystemReader(folder)
        loaded = empty_state(engine, comm.rank, reader.read_metadata().state_dict_metadata)
        refusal = _other_optimizers(engine, metadata)
    except FileNotFoundError:
        refusal = "it is not there, or not a whole checkpoint of an engine"
    except (Exception, CheckpointException) as error:
        refusal = str(cause_of(error))
    agree(comm, refusal, folder)
    try:  # into new tensors: the engine stays as it is if this fails
        dcp.load(dict(loaded), storage_reader=reader, planner=LoadPlanner(), process_group=comm.group)
    except (Exception, CheckpointException) as error:
        refusal = str(cause_of(error))
    agree(comm, refusal, folder)
    restore(engine, comm.rank, loaded)
    load_offloaded(engine, folder, loaded)
    engine.restore_metadata(metadata)
    extra: dict[str, Any] = metadata["extra"]
    return extra


def _other_optimizers(engine: Engine, facts: Mapping[str, Any]) -> str:
    """Why the optimizers of the engine cannot go on from the saved ones, or ""; an engine without any can."""
    own = engine.metadata()
    counts = [[len(groups) for groups in each["groups"]] for each in (own, facts)]
    if not engine.optimizers or (own["optimizers"] == facts["optimizers"] and counts[0] == counts[1]):
        return ""
    saved = ", ".join(facts["optimizers"]) or "no optimizer"
    return f"it has the state of {saved} with {counts[1]} groups, the engine {', '.join(own['optimizers'])} with {counts[0]}"


def prepare(folder: Path) -> str:
    """Prepare to write `folder`; why that cannot be, or ""."""
    partial = partial_folder(folder)
    if folder.exists():
        return "it exists; choose another name, or remove it first"
    if folder.parent.exists() and not folder.parent.is_dir():
        return f"{folder.parent} is not a folder"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():  # of a job that was killed
            shutil.rmtree(partial)
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    return ""


def partial_folder(folder: Path) -> Path:
    """The name of a folder while it is being written."""
    return folder.with_name(f"{folder.name}.tmp")


def agree(comm: Communicator, refusal: str, folder: Path) -> None:
    """Raise `CheckpointError` on all ranks if any has a reason to."""
    told = comm.all_gather_object(refusal)
    found = next(((rank, why) for rank, why in enumerate(told) if why), None)
    if found is not None:
        raise CheckpointError(f"checkpoint {folder}: {found[1]} (rank {found[0]})")


def cause_of(error: BaseException) -> OSError | str:
    """The failure behind those that it led to, of several ranks or of closing files; or its first line."""
    if isinstance(error, CheckpointException):
        causes = [cause_of(failure) for failure, _ in error.failures.values()]
        return next((cause for cause in causes if isinstance(cause, OSError)), causes[0])
    behind = error.__cause__ or error.__context__
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) or behind is None:
        return error if isinstance(error, OSError) else f"{type(error).__name__}: {error}".splitlines()[0]
    return cause_of(behind)
