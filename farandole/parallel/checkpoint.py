"""The state of an engine on a disk: boxes of globally named tensors, in PyTorch's distributed checkpoint format.

    model.NAME              a parameter in the type that the optimizer updates, frozen or not, or a buffer
    optimizer.NAME/KEY      a state that an optimizer keeps of a parameter (`exp_avg`, ...); numbers are whole
    random.rankN            the generator of a rank, random.cuda.rankN that of its accelerator
    compression.rankN.KEY   what compression remembers on a rank

Every rank saves the boxes that it stores, under the names of the model of one process.  Who loads names the boxes it wants, and gets
them from whatever boxes there are, so a checkpoint of any number of ranks, stage of ZeRO and precision is one of every other.
What several ranks store alike has the same name and place on each, and is written once.

Optimizer states that are offloaded pass through memory one bucket at a time, when they are saved and when they are loaded.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from farandole.layout import Box, boxes_of_range, volume
from farandole.memory.offloaded_optimizer import ShardState, UnitReader
from farandole.parallel.errors import CheckpointError

if TYPE_CHECKING:
    from farandole.parallel.engine import Engine

FACTS = "engine.json"
_VERSION = 1

# ---- parts of tensors, as torch saves and loads them ----


@dataclass(frozen=True)
class Range:
    """Consecutive elements of a flattened tensor of `shape`, the first of which is number `start`.

    torch knows it by its two methods (`torch.distributed._checkpointable`) and the planners below, as the boxes that it consists of.
    `load` brings the elements, flat, where they are not `held` in memory; they are valid until others are brought.
    """

    shape: tuple[int, ...]
    start: int
    length: int
    dtype: torch.dtype
    held: Tensor | None = None
    load: Callable[[], Tensor] | None = None

    @staticmethod
    def of(values: Tensor, start: int, shape: Sequence[int]) -> Range:
        """The range of `values`, which are in memory."""
        flat = values.detach().reshape(-1)
        return Range(tuple(shape), start, flat.numel(), flat.dtype, held=flat)

    @property
    def values(self) -> Tensor:
        """The elements, flat."""
        if self.held is not None:
            return self.held
        assert self.load is not None
        return self.load()

    @property
    def nbytes(self) -> int:
        """The size of the elements."""
        return self.length * self.dtype.itemsize

    def part(self, offsets: Sequence[int]) -> Tensor:
        """The elements of the box that begins at `offsets`."""
        begun = 0
        for box in self._boxes():
            count = volume(box)
            if tuple(start for start, _ in box) == tuple(offsets):
                return self.values[begun : begun + count].view([end - start for start, end in box])
            begun += count
        raise KeyError(f"no box begins at {tuple(offsets)}")

    def _boxes(self) -> list[Box]:
        whole = tuple((0, length) for length in self.shape)
        return boxes_of_range(whole, self.start, self.start + self.length)

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                torch.Size([start for start, _ in box]), torch.Size([end - start for start, end in box])
            )
            for box in self._boxes()
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape)),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()


State = dict[str, "Tensor | Range"]


class SavePlanner(DefaultSavePlanner):
    """Plans a save of ranges and of ordinary tensors, by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is to be written under `index`."""
        found = self.state_dict[index.fqn]
        return found.part(index.offset or ()) if isinstance(found, Range) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Plans to load ranges and ordinary tensors, by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state as it is: torch's own way forgets values of types that it does not know."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where to put what was saved under `index`."""
        found = self.state_dict[index.fqn]
        return found.part(index.offset or ()) if isinstance(found, Range) else super().lookup_tensor(index)


# ---- the state of an engine ----


def state_of(engine: Engine, rank: int) -> State:
    """The state of `engine` as it is; its tensors are the engine's own."""
    state: State = {f"model.{s.name}": Range.of(s.values, s.start, s.shape) for s in _stored(engine)}
    for prefix, name, parameter, piece, start, states in _states(engine):
        for key, value in states.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"an optimizer keeps {key!r} of {name} as {type(value).__name__}: only tensors can be saved"
                )
            like = value.dim() and value.numel() == piece.numel()
            state[f"{prefix}.{name}/{key}"] = Range.of(value, start, parameter.shape) if like else value
    state |= _offloaded_state(engine)
    state[f"random.rank{rank}"] = torch.get_rng_state()
    if engine.device.type == "cuda":
        state[f"random.cuda.rank{rank}"] = torch.cuda.get_rng_state(engine.device)
    for key, value in engine.compression_state().items():
        state[f"compression.rank{rank}.{key}"] = value
    return state


def room_for(engine: Engine, rank: int, saved: Mapping[str, STORAGE_TYPES]) -> State:
    """New tensors for what was `saved` and this rank needs.

    What a checkpoint has no part of for this rank, as the generator of one that it did not have, is left out.

    Raises:
        CheckpointError: where a trained parameter is missing, or has another shape.
    """
    room: State = {}
    for stored in _stored(engine):
        entry = f"model.{stored.name}"
        if entry in saved:
            room[entry] = _room_for_range(
                saved[entry], stored.shape, stored.start, stored.values.numel(), entry
            )
        elif stored.trained:  # earlier versions saved neither buffers nor frozen parameters
            raise CheckpointError(f"it has no parameter {stored.name}: it is a checkpoint of another model")
    for prefix, name, parameter, piece, start, _ in _states(engine):
        for key in _keys_of(saved, prefix).get(name, ()):
            entry = f"{prefix}.{name}/{key}"
            room[entry] = _room_of_state(saved[entry], piece, start, parameter)
    own = (f"random.rank{rank}", f"random.cuda.rank{rank}")
    for entry, description in saved.items():
        if entry in own or entry.startswith(f"compression.rank{rank}."):
            room[entry] = _empty_as(description)
    if engine.device.type != "cuda":
        room.pop(own[1], None)
    return room


def commit(engine: Engine, rank: int, loaded: State) -> None:
    """Have `engine` go on from what was loaded into the room that `room_for` made; all ranks call it."""
    with torch.no_grad():
        for stored in _stored(engine):
            new = loaded.get(f"model.{stored.name}")
            if isinstance(new, Range):
                stored.values.copy_(new.values.view(stored.values.shape))
    for prefix, name, _, piece, _, states in _states(engine):
        own = f"{prefix}.{name}/"
        states.clear()  # of steps that the checkpoint does not have
        for entry, found in loaded.items():
            if entry.startswith(own):
                states[entry.removeprefix(own)] = _as_state(found, piece)
    engine.publish()
    remembered = f"compression.rank{rank}."
    engine.load_compression(
        {
            entry.removeprefix(remembered): value
            for entry, value in loaded.items()
            if entry.startswith(remembered) and isinstance(value, Tensor)
        }
    )
    generator = loaded.get(f"random.rank{rank}")
    if isinstance(generator, Tensor):
        torch.set_rng_state(generator)
    generator = loaded.get(f"random.cuda.rank{rank}")
    if isinstance(generator, Tensor):
        torch.cuda.set_rng_state(generator, engine.device)


def _as_state(found: Tensor | Range, piece: nn.Parameter) -> Tensor:
    """A state as optimizers keep it: laid out as the piece, on its device."""
    if isinstance(found, Tensor):
        return found
    like = torch.empty_like(piece, dtype=found.dtype, requires_grad=False)
    return like.copy_(found.values.view(piece.shape))


@dataclass(frozen=True)
class _Stored:
    """What this rank stores of a parameter or buffer of `shape`: `values`, from element `start` on."""

    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    trained: bool = False


def _stored(engine: Engine) -> Iterator[_Stored]:
    """Parameters and buffers, by the names of the model's state."""
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    values_of = dict(engine.piece_values())
    trained = {id(parameter) for bucket in engine.buckets for parameter in bucket.parameters}
    for parameter, piece, start in engine.pieces():
        shape = tuple(parameter.shape)
        yield _Stored(names[id(parameter)], shape, start, values_of[piece], trained=True)
    for parameter, values, start in engine.frozen_shards():
        yield _Stored(names[id(parameter)], tuple(parameter.shape), start, values)
    for name, parameter in engine.model.named_parameters():
        plain = type(parameter.data) is Tensor  # quantized ones are saved by those who made them
        if plain and id(parameter) not in trained and not engine.divides(parameter):
            yield _Stored(name, tuple(parameter.shape), 0, parameter.detach())
    for name, buffer in _persistent_buffers(engine.model):
        yield _Stored(name, tuple(buffer.shape), 0, buffer)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


_StateOf = tuple[str, str, nn.Parameter, nn.Parameter, int, dict[str, Any]]


def _states(engine: Engine) -> Iterator[_StateOf]:
    """(prefix of names, name, parameter, piece, start, states) of what optimizers keep in memory."""
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    places = {id(piece): (parameter, piece, start) for parameter, piece, start in engine.pieces()}
    if engine.offloaded:
        return
    for number, optimizer in enumerate(engine.optimizers):
        for piece in (each for group in optimizer.param_groups for each in group["params"]):
            parameter, _, start = places[id(piece)]
            yield _prefix(number), names[id(parameter)], parameter, piece, start, optimizer.state[piece]


def _prefix(number: int) -> str:
    """Of the states of optimizer `number`."""
    return f"optimizer{number}" if number else "optimizer"


def _keys_of(saved: Mapping[str, STORAGE_TYPES], prefix: str) -> dict[str, list[str]]:
    """For each parameter the states of its optimizer that were saved."""
    keys: dict[str, list[str]] = {}
    for entry in saved:
        if entry.startswith(f"{prefix}."):
            name, _, key = entry.removeprefix(f"{prefix}.").rpartition("/")
            keys.setdefault(name, []).append(key)
    return keys


# ---- room for what is loaded ----


def _described(description: STORAGE_TYPES) -> TensorStorageMetadata:
    if not isinstance(description, TensorStorageMetadata):
        raise CheckpointError(f"expected a tensor, found {type(description).__name__}")
    return description


def _empty_as(description: STORAGE_TYPES) -> Tensor:
    """Room for a whole tensor as it was saved."""
    found = _described(description)
    return torch.empty(found.size, dtype=found.properties.dtype)


def _shape_in(description: STORAGE_TYPES, shape: Sequence[int], entry: str) -> tuple[int, ...]:
    """The shape under which a tensor was saved: its own, or that of the flat tensor that earlier versions saved."""
    size = tuple(_described(description).size)
    if size not in (tuple(shape), (math.prod(shape),)):
        raise CheckpointError(f"{entry} has shape {size} in it, and {tuple(shape)} in this model")
    return size


def _room_for_range(
    description: STORAGE_TYPES, shape: Sequence[int], start: int, length: int, entry: str
) -> Range:
    """Room for consecutive elements, in the type that was saved."""
    empty = torch.empty(length, dtype=_described(description).properties.dtype)
    return Range.of(empty, start, _shape_in(description, shape, entry))


def _room_of_state(
    description: STORAGE_TYPES, piece: nn.Parameter, start: int, parameter: nn.Parameter
) -> Tensor | Range:
    found = _described(description)
    size = tuple(found.size)
    if size not in (tuple(parameter.shape), (parameter.numel(),)) or not size:
        return _empty_as(description)
    return Range.of(torch.empty(piece.numel(), dtype=found.properties.dtype), start, size)


# ---- states that are offloaded ----


def _offloaded_state(engine: Engine) -> State:
    """What offloaded optimizers keep, by name; ranges are brought when they are written, in this order."""
    places = _places(engine)
    state: State = {}
    for number, update in enumerate(engine.offloaded):
        reader = UnitReader(update.state)
        for unit, members in enumerate(update.state.units):
            for at, (piece, kept) in enumerate(zip(members, update.state.kept(unit), strict=True)):
                name, start, shape = places[id(piece)]
                for key, value in kept.items():
                    entry = f"{_prefix(number)}.{name}/{key}"
                    if isinstance(value, torch.dtype):
                        load = partial(_load_state, reader, unit, at, key)
                        state[entry] = Range(shape, start, piece.numel(), value, load=load)
                    elif isinstance(value, Tensor):
                        state[entry] = value
    return state


def _load_state(reader: UnitReader, unit: int, at: int, key: str) -> Tensor:
    value: Tensor = reader.states(unit)[at].state[key]
    return value.view(-1)


def load_offloaded(engine: Engine, folder: Path) -> None:
    """Have offloaded optimizers go on from what checkpoint files in `folder` have of their pieces, after `commit`."""
    values_of = dict(engine.piece_values())
    for number, update in enumerate(engine.offloaded):
        for unit, members in enumerate(update.state.units):
            found = _read_states(engine, folder, _prefix(number), members)
            pieces = []
            for piece, states, kept in zip(members, found, update.state.kept(unit), strict=True):
                # those that are kept by element have the shape of the piece, also if its parameter is a number
                shaped = {
                    key: value.view(piece.shape) if isinstance(kept.get(key), torch.dtype) else value
                    for key, value in states.items()
                }
                pieces.append(ShardState(values_of[piece], shaped))
            update.state.load(unit, pieces)


def _read_states(
    engine: Engine, folder: Path, prefix: str, members: Sequence[nn.Parameter]
) -> list[dict[str, Tensor]]:
    """The states of some pieces, from the files of a checkpoint; each rank reads by itself."""
    reader, places = FileSystemReader(folder), _places(engine)
    saved = reader.read_metadata().state_dict_metadata
    parameters = {id(piece): parameter for parameter, piece, _ in engine.pieces()}
    keys = _keys_of(saved, prefix)
    room: State = {}
    for piece in members:
        name, start, _ = places[id(piece)]
        for key in keys.get(name, ()):
            entry = f"{prefix}.{name}/{key}"
            room[entry] = _room_of_state(saved[entry], piece, start, parameters[id(piece)])
    if room:
        dcp.load(dict(room), storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    found: list[dict[str, Tensor]] = []
    for piece in members:
        name = places[id(piece)][0]
        states = {key: room[f"{prefix}.{name}/{key}"] for key in keys.get(name, ())}
        found.append({k: v.values if isinstance(v, Range) else v for k, v in states.items()})
    return found


def _places(engine: Engine) -> dict[int, tuple[str, int, tuple[int, ...]]]:
    """Of each piece: the name of its parameter, where it begins in it, and the parameter's shape."""
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    return {
        id(piece): (names[id(parameter)], start, tuple(parameter.shape))
        for parameter, piece, start in engine.pieces()
    }


# ---- a checkpoint of an engine alone ----


def save(engine: Engine, folder: Path, extra: Mapping[str, Any]) -> None:
    """See `Engine.save`."""
    comm = engine.comm
    partial_folder = folder.with_name(f"{folder.name}.tmp")
    text, refusal = "", ""
    try:
        text = json.dumps({"version": _VERSION, **engine.facts(), "extra": dict(extra)}, indent=1)
    except TypeError as error:
        refusal = f"extra cannot be written as JSON: {error}"
    if comm.rank == 0 and not refusal:
        refusal = _make_room(folder, partial_folder)
    _agree(engine, refusal, folder)
    try:
        writer = FileSystemWriter(partial_folder, sync_files=True)
        dcp.save(
            dict(state_of(engine, comm.rank)),
            storage_writer=writer,
            planner=SavePlanner(),
            process_group=comm.group,
        )
        if comm.rank == 0:
            (partial_folder / FACTS).write_text(text)
            partial_folder.rename(folder)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        refusal = str(cause_of(error))
        if comm.rank == 0:
            shutil.rmtree(partial_folder, ignore_errors=True)
    _agree(engine, refusal, folder)


def load(engine: Engine, folder: Path) -> dict[str, Any]:
    """See `Engine.load`."""
    comm, facts, loaded, refusal = engine.comm, {}, State(), ""
    try:
        facts = json.loads((folder / FACTS).read_text())
        reader = FileSystemReader(folder)
        loaded = room_for(engine, comm.rank, reader.read_metadata().state_dict_metadata)
        refusal = _other_optimizers(engine, facts)
    except FileNotFoundError:
        refusal = "it is not there, or not a whole checkpoint of an engine"
    except (Exception, CheckpointException) as error:
        refusal = str(cause_of(error))
    _agree(engine, refusal, folder)
    try:  # into new tensors: the engine stays as it is if this fails
        dcp.load(dict(loaded), storage_reader=reader, planner=LoadPlanner(), process_group=comm.group)
    except (Exception, CheckpointException) as error:
        refusal = str(cause_of(error))
    _agree(engine, refusal, folder)
    commit(engine, comm.rank, loaded)
    load_offloaded(engine, folder)
    engine.take_facts(facts)
    extra: dict[str, Any] = facts["extra"]
    return extra


def _other_optimizers(engine: Engine, facts: Mapping[str, Any]) -> str:
    """Why the optimizers of the engine cannot go on from the saved ones, or ""; an engine without any can."""
    own = engine.facts()
    counts = [[len(groups) for groups in each["groups"]] for each in (own, facts)]
    if not engine.optimizers or (own["optimizers"] == facts["optimizers"] and counts[0] == counts[1]):
        return ""
    saved = ", ".join(facts["optimizers"]) or "no optimizer"
    return f"it has the state of {saved} with {counts[1]} groups, the engine {', '.join(own['optimizers'])} with {counts[0]}"


def _make_room(folder: Path, partial_folder: Path) -> str:
    """Prepare to write `folder`; why that cannot be, or ""."""
    if folder.exists():
        return "it exists; choose another name, or remove it first"
    if folder.parent.exists() and not folder.parent.is_dir():
        return f"{folder.parent} is not a folder"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if partial_folder.exists():  # of a job that was killed
            shutil.rmtree(partial_folder)
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    return ""


def _agree(engine: Engine, refusal: str, folder: Path) -> None:
    """Raise `CheckpointError` on all ranks if any has a reason to."""
    told = engine.comm.all_gather_object(refusal)
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
