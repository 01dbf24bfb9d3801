"""Save checkpoints of an engine, optionally in the background, and load them under any plan.

    engine.save(folder, extra={"step": n})            # see `state` for the contents
    pending = engine.save(folder, asynchronous=True)  # copies the state to host memory; a thread writes the copy
    pending.wait()
    engine.load(folder)
    engine.export(folder)                             # model.safetensors: only parameters and buffers, for other tools
    engine.load_weights(folder)

A folder is named `FOLDER.tmp` until all of its files are on disk.
"""

from __future__ import annotations

import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.comm.fallback import local_group
from farandole.comm.notices import warn_once
from farandole.parallel.checkpoint.errors import CheckpointError, UnreadableError
from farandole.parallel.checkpoint.ranges import Range
from farandole.parallel.checkpoint.state import (
    State,
    empty_state,
    modules_with_extra_state,
    offloaded_states,
    persistent_buffers,
    restore,
    state_of,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

    from farandole.parallel.engine import Engine

METADATA = "engine.json"
_VERSION = 1


class PendingSave:
    """A checkpoint that is being written to `folder`."""

    def __init__(self, folder: Path, comm: Communicator, failure: OSError | str) -> None:
        self.folder = folder
        self._comm, self._failure = comm, failure
        self._nbytes = 0  # written by this rank
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Return whether this rank has finished writing.  Only `wait` reports errors."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is on disk.  This is a collective call.

        Raises:
            CheckpointError: on all ranks, if writing failed on any rank.  Later calls do not raise the error again.
        """
        self.join()
        failure, self._failure = self._failure, ""
        try:
            raise_on_all(self._comm, failure, self.folder)
        except CheckpointError as error:
            error.nbytes = sum(self._comm.all_gather_object(self._nbytes))
            raise

    def join(self, timeout_s: float | None = None) -> None:
        """Wait at most `timeout_s` seconds for this rank to finish writing.  This is not a collective call."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def start(
        self, state: State, text: str, on_saved: Callable[[], None] | None, *, background: bool
    ) -> None:
        """Write `state` and the metadata `text`, in a thread if `background` is set."""
        if not background:
            self._write(state, text, on_saved, self._comm.group)
            return
        writers = _writers_of(self._comm)
        self._thread = threading.Thread(
            target=self._write,
            args=(state, text, on_saved, writers.group, writers.last),
            name="farandole-checkpoint",
            daemon=True,
        )
        self._thread.start()
        writers.last = self._thread

    def _write(
        self,
        state: State,
        text: str,
        on_saved: Callable[[], None] | None,
        group: dist.ProcessGroup,
        previous: threading.Thread | None = None,
    ) -> None:
        if previous is not None:  # so that all ranks make collective calls in the order of the saves
            previous.join()
        partial = partial_folder(self.folder)
        try:
            self._write_state(state, partial, group)
            state.clear()  # frees the copies of the state
            if self._comm.rank == 0:  # all ranks have written their parts: dcp.save is a collective call
                (partial / METADATA).write_text(text)
                partial.rename(self.folder)
                if on_saved is not None:
                    on_saved()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is not an Exception
            self._failure = reason_of(error)
            if self._comm.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def _write_state(self, state: State, folder: Path, group: dist.ProcessGroup) -> None:
        from farandole.parallel.checkpoint.storage import SavePlanner, write_state

        planner = SavePlanner()
        try:
            write_state(folder, state, group, planner)
        finally:
            self._nbytes = planner.nbytes


@dataclass
class _Writers:
    """The process group of the checkpoint-writing threads, and the last thread started."""

    group: dist.ProcessGroup
    last: threading.Thread | None = None


_writers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Writers] = weakref.WeakKeyDictionary()


def _writers_of(comm: Communicator) -> _Writers:
    if comm.group not in _writers:
        ranks = [dist.get_global_rank(comm.group, rank) for rank in range(comm.size)]
        # a separate group, so that the threads' collectives do not interfere with training
        _writers[comm.group] = _Writers(local_group(comm.group, ranks))
    return _writers[comm.group]


def save(
    engine: Engine,
    folder: Path,
    extra: Mapping[str, Any],
    on_saved: Callable[[], None] | None,
    *,
    background: bool,
) -> PendingSave:
    """Save the engine to a folder; see `Engine.save`."""
    comm, text, state = engine.comm, "", State()
    _warn_of_buffers(engine)
    failure: OSError | str = ""
    try:
        text = _json({"version": _VERSION, **engine.metadata(), "extra": dict(extra)})
        if comm.rank == 0:
            prepare(folder)
        state = state_of(engine, comm.rank)
        _warn_of_extra_state(engine.model, state)
    except (OSError, CheckpointError) as error:
        failure = reason_of(error)
    pending = PendingSave(folder, comm, failure)
    if not any(comm.all_gather_object(bool(failure))):
        if background:
            state = {name: _copy(value) for name, value in state.items()}
        pending.start(state, text, on_saved, background=background)
    # wait, because the next step changes offloaded state in place
    if not background or any(isinstance(each, Range) and each.held is None for each in state.values()):
        pending.wait()
    return pending


def _warn_of_extra_state(model: nn.Module, state: State) -> None:
    names = [
        path or type(module).__name__
        for path, module in modules_with_extra_state(model)
        if f"extra.{path}" not in state
    ]
    if names:
        warn_once(
            f"the checkpoint does not contain the extra state of {', '.join(names[:5])}; define set_extra_state, and let "
            "get_extra_state return only tensors, numbers, strings, lists and dictionaries"
        )


def _warn_of_buffers(engine: Engine) -> None:
    """Warn about buffers that are not saved because a forward pass has created or resized them."""
    names = [name for name, b in persistent_buffers(engine.model) if not engine.has_layout(name, b)]
    if names:
        warn_once(
            f"the checkpoint does not contain the buffers {', '.join(names[:5])}, because the forward pass created or "
            "resized them; give them their final shapes before parallelize, or register them with persistent=False"
        )


def _json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, indent=1)
    except TypeError as error:
        raise CheckpointError(
            f"`extra` cannot be written as JSON ({error}); pass only numbers, strings, lists and dictionaries"
        ) from error


def _copy(value: Tensor | Range) -> Tensor | Range:
    """Copy `value` to host memory, unless it is offloaded."""
    if isinstance(value, Range):
        return value if value.held is None else replace(value, held=value.held.to("cpu", copy=True))
    return value.detach().to("cpu", copy=True)


def load(engine: Engine, folder: Path, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Load a checkpoint into the engine; see `Engine.load`.

    Pass `metadata` for checkpoints of earlier versions, which have no metadata file.
    """
    from farandole.parallel.checkpoint.storage import load_state, read_metadata

    comm = engine.comm
    with fail_on_all(comm, folder):
        try:
            found = metadata or json.loads((folder / METADATA).read_text())
            saved = read_metadata(folder).state_dict_metadata
        except FileNotFoundError:
            raise UnreadableError(
                "the folder does not exist, or is not a complete engine checkpoint; check the path"
            ) from None
        if (version := found.get("version", _VERSION)) > _VERSION:
            raise CheckpointError(
                f"expected format version {_VERSION} or lower, got version {version}; load the checkpoint with the version "
                "of farandole that wrote it, or a later one"
            )
    with fail_on_all(comm, folder):
        loaded = empty_state(engine, comm.rank, saved)
        _check_optimizers(engine, found)
    with fail_on_all(comm, folder):
        # load into new tensors, so that a failure does not change the engine
        load_state(folder, loaded, comm.group)
        # offload records have no space for a second state, so offloaded states are read twice: to check, and to load
        for update, unit, states in offloaded_states(engine, folder, loaded):
            try:
                update.check(unit, states)
            except ValueError as error:
                raise CheckpointError(f"its optimizer states do not fit this engine: {error}") from error
    try:
        with fail_on_all(comm, folder):
            for update, unit, states in offloaded_states(engine, folder, loaded):
                update.load(unit, states)
    except CheckpointError:
        for update in engine.offloaded:
            update.invalidate()
        raise
    restore(engine, comm.rank, loaded)
    engine.restore_metadata(found)
    extra: dict[str, Any] = found["extra"]
    return extra


def _check_optimizers(engine: Engine, found: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the engine has optimizers that differ from the saved ones."""
    own = engine.metadata()
    counts = [[len(groups) for groups in each["groups"]] for each in (own, found)]
    if engine.optimizers and (own["optimizers"] != found["optimizers"] or counts[0] != counts[1]):
        saved = ", ".join(found["optimizers"]) or "no optimizer"
        raise CheckpointError(
            f"the checkpoint contains the state of {saved} with {counts[1]} parameter groups, but the engine has "
            f"{', '.join(own['optimizers'])} with {counts[0]}; create the optimizers as in the saved run"
        )


def prepare(folder: Path) -> None:
    """Create the parent of `folder`, and remove a temporary folder that a killed job left behind.

    Raises:
        CheckpointError: if `folder` exists, or its parent is not a folder.
        OSError: if a folder cannot be created or removed.
    """
    if folder.exists():
        raise CheckpointError("the folder exists; choose another name, or remove the folder first")
    if folder.parent.exists() and not folder.parent.is_dir():
        raise CheckpointError(f"{folder.parent} is not a folder; choose another path")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if partial_folder(folder).exists():  # left by a killed job
        shutil.rmtree(partial_folder(folder))


def partial_folder(folder: Path) -> Path:
    """Return the name that `folder` has while it is being written."""
    return folder.with_name(f"{folder.name}.tmp")


@contextmanager
def fail_on_all(comm: Communicator, folder: Path) -> Iterator[None]:
    """Return a context manager that raises a `CheckpointError` about `folder` on all ranks if any rank fails.

    All ranks must enter the context.  If files are missing or damaged, the error is an `UnreadableError`.
    """
    failure: OSError | str = ""
    cause: BaseException | None = None
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        failure, cause = reason_of(error), error
    raise_on_all(comm, failure, folder, cause)


def raise_on_all(
    comm: Communicator, failure: OSError | str, folder: Path, cause: BaseException | None = None
) -> None:
    """Raise a `CheckpointError` about `folder` on all ranks if any rank has a `failure`.  This is a collective call."""
    damaged = cause is not None and _is_damage(cause)
    for rank, (reason, unreadable) in enumerate(comm.all_gather_object((failure, damaged))):
        if reason:
            kind = UnreadableError if unreadable else CheckpointError
            error = kind(f"checkpoint {folder}: {reason} (rank {rank})")
            error.reason = reason
            raise error from cause


def _is_damage(error: BaseException) -> bool:
    """Return whether `error` indicates that files are missing or damaged."""
    if _is_torch_error(error):
        return all(_is_damage(failure) for failure, _ in error.failures.values())
    if isinstance(error, CheckpointError):
        return isinstance(error, UnreadableError)
    # libraries raise many exception types for damaged files, so all but system and memory errors indicate damage
    reason = reason_of(error)
    if isinstance(reason, OSError):
        return isinstance(reason, FileNotFoundError)
    lacks_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "tried to allocate" in str(
        error
    )
    return not lacks_memory


def _is_torch_error(error: BaseException) -> TypeGuard[CheckpointException]:
    from torch.distributed.checkpoint.api import CheckpointException

    return isinstance(error, CheckpointException)


def reason_of(error: BaseException) -> OSError | str:
    """Return the `OSError` that caused `error` or, if there is none, the first line of the root cause's message."""
    if _is_torch_error(error):
        reasons = [reason_of(failure) for failure, _ in error.failures.values()]
        return next((reason for reason in reasons if isinstance(reason, OSError)), reasons[0])
    if isinstance(error, OSError):
        return error
    if isinstance(error, CheckpointError):
        return str(error)
    behind = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0] if behind is None else reason_of(behind)
