"""The saved state of an engine, in PyTorch's distributed checkpoint format.

    model.NAME              a parameter, trained or frozen, in the dtype that the optimizer updates; or a buffer
    optimizer.NAME/KEY      an optimizer state of a parameter (`exp_avg`, ...); non-elementwise states are saved whole
    random.rankN            the state of the CPU generator of group N; the ranks of a group process the same samples
                            (tensor and context parallelism) and draw the same random numbers
    random.cuda.rankN       the state of the accelerator's generator of group N
    compression.rankN.KEY   the compression residuals of rank N
    merged.LAYER            exists if the LoRA adapter of this layer is merged into its weight
    extra.MODULE            the module's `get_extra_state()`, serialized by `torch.save`

Each rank saves its boxes under the tensor names of the unsharded model, and reads the boxes that it needs.
Therefore a checkpoint can be loaded on any number of ranks, at any ZeRO stage and in any precision.  A tensor that
several ranks store is written once.

Offloaded optimizer states are saved and loaded one bucket at a time.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from farandole._troubleshooting import see
from farandole.memory.offloaded_optimizer import ShardState, UnitReader
from farandole.mesh import AXES
from farandole.parallel.checkpoint.errors import CheckpointError
from farandole.parallel.checkpoint.ranges import Range, TensorBoxes
from farandole.parallel.lora.adapters import lora_layers
from farandole.parallel.zero.weights import FlatWeights

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

    from farandole.parallel.engine import Engine
    from farandole.parallel.optimizers.offloading import OffloadedUpdate

State = dict[str, "Tensor | Range"]

# ---- the state of an engine ----


def state_of(engine: Engine, rank: int) -> State:
    """Return the state of `engine` on this rank.  The returned tensors share memory with the engine."""
    reader = _WeightReader()
    state: State = {f"model.{s.name}": reader.range_of(s) for s in stored_tensors(engine)}
    for stem, place, shard, start, states in _states(engine):
        for key, value in states.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"expected tensors as optimizer states, got {type(value).__name__} for {key!r} of "
                    f"{stem.partition('.')[2]}; use an optimizer that stores its state in tensors"
                )
            by_element = value.dim() and value.numel() == shard.numel()
            state[f"{stem}/{key}"] = Range.of(value, start, place) if by_element else value
    state |= _offloaded_state(engine, state)
    number = _generator_number(engine, rank)
    state[f"random.rank{number}"] = torch.get_rng_state()
    if engine.device.type == "cuda":
        state[f"random.cuda.rank{number}"] = torch.cuda.get_rng_state(engine.device)
    for key, value in engine.compression_state().items():
        state[f"compression.rank{rank}.{key}"] = value
    merged = [path for path, layer in lora_layers(engine.model).items() if layer.merged]
    state |= {f"merged.{path}": torch.tensor(True) for path in merged}
    for path, module in modules_with_extra_state(engine.model):
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            content = _serialized(module.get_extra_state())
            state |= {} if content is None else {f"extra.{path}": content}
    return state


def modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for each module that overrides `get_extra_state`."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield path, module


def _serialized(value: Any) -> Tensor | None:
    """Return `value` as uint8 elements, or None if `torch.load(weights_only=True)` could not read it."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        _deserialized(content := torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
    except (pickle.PickleError, AttributeError, TypeError):
        return None
    return content


def _deserialized(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location="cpu", weights_only=True)


def empty_state(engine: Engine, rank: int, saved: Mapping[str, STORAGE_TYPES]) -> State:
    """Return uninitialized tensors for the entries of `saved` that this rank loads.

    Raises:
        CheckpointError: if a trained parameter is missing, a tensor has a different shape, or a LoRA adapter is merged
            only in the checkpoint or only in the model.
    """
    _check_merged(engine.model, saved)
    state: State = {}
    for stored in stored_tensors(engine):
        entry = f"model.{stored.name}"
        if entry in saved:
            values = _empty_range(saved[entry], stored.place, stored.start, stored.values().numel())
            if values is None:
                size = tuple(_described(saved[entry]).size)
                raise CheckpointError(
                    f"{entry} has shape {size} in the checkpoint, but {stored.place.shape} in this model; load a "
                    f"checkpoint of this model{see('belongs-to-another-model')}"
                )
            state[entry] = values
        elif stored.trained:  # earlier versions saved neither buffers nor frozen parameters
            raise CheckpointError(
                f"the checkpoint has no parameter {stored.name}: it belongs to another model; load a checkpoint of "
                f"this model{see('belongs-to-another-model')}"
            )
    keys = _keys_of(saved)
    for stem, place, shard, start, _ in _states(engine):
        for entry in (f"{stem}/{key}" for key in keys[stem]):
            state[entry] = _empty_optimizer_state(saved[entry], shard, start, place)
    number = _generator_number(engine, rank)
    own = [f"random.rank{number}", *([f"random.cuda.rank{number}"] if engine.device.type == "cuda" else [])]
    extra = {f"extra.{path}" for path, _ in modules_with_extra_state(engine.model)}
    for entry, description in saved.items():
        if entry in own or entry in extra or entry.startswith(f"compression.rank{rank}."):
            state[entry] = _empty_as(description)
    return state


def _check_merged(model: nn.Module, saved: Mapping[str, STORAGE_TYPES]) -> None:
    """Raise `CheckpointError` if an adapter is merged only in the checkpoint or only in the model."""
    for path, layer in lora_layers(model).items():
        if layer.merged != (f"merged.{path}" in saved):
            where, call = ("this model", "unmerge") if layer.merged else ("the checkpoint", "merge")
            raise CheckpointError(
                f"the LoRA adapter of {path} is merged only in {where}; before loading, call {call}(model) within "
                "engine.edit_parameters()"
            )


def restore(engine: Engine, rank: int, loaded: State) -> None:
    """Copy the `loaded` state to `engine`.  This is a collective call.

    Args:
        loaded: the result of `empty_state`, filled with the checkpoint's values.
    """
    with torch.no_grad():
        pairs = ((stored, loaded.get(f"model.{stored.name}")) for stored in stored_tensors(engine))
        set_values((stored, new.values) for stored, new in pairs if isinstance(new, Range) and new.length)
    keys = _keys_of(loaded)
    for stem, _, shard, _, states in _states(engine):
        states.clear()  # they belong to steps after the checkpoint
        states.update({key: _as_state(loaded[f"{stem}/{key}"], shard) for key in keys[stem]})
    engine.all_gather_parameters(frozen=True)
    whole = {entry: value for entry, value in loaded.items() if isinstance(value, Tensor)}
    own = f"compression.rank{rank}."
    engine.load_compression({e.removeprefix(own): v for e, v in whole.items() if e.startswith(own)})
    for path, module in modules_with_extra_state(engine.model):
        if (content := whole.get(f"extra.{path}")) is not None:
            module.set_extra_state(_deserialized(content))
    number = _generator_number(engine, rank)
    if (generator := whole.get(f"random.rank{number}")) is not None:
        torch.set_rng_state(generator)
    if (generator := whole.get(f"random.cuda.rank{number}")) is not None:
        torch.cuda.set_rng_state(generator, engine.device)


def _generator_number(engine: Engine, rank: int) -> int:
    """Return the index of the group of ranks that draw the same random numbers as `rank`."""
    mesh = engine.mesh
    axes = [axis for axis in AXES if axis not in ("context", "tensor")]
    places = [mesh.of_rank(each)[0].at(axes) for each in range(mesh.size)]
    return sorted(set(places)).index(places[rank])


def _as_state(found: Tensor | Range, shard: nn.Parameter) -> Tensor:
    """Return a loaded state as a tensor; an elementwise state gets the shard's shape, strides and device."""
    if isinstance(found, Tensor):
        return found
    like = torch.empty_like(shard, dtype=found.dtype, requires_grad=False)
    return like.copy_(found.values.view(shard.shape))


@dataclass(frozen=True)
class Stored:
    """The elements of a parameter or buffer that this rank stores.

    `values()` returns the elements, which can be changed in place.  The first element has index `start` in the
    rank's flattened tensor.  Offloaded `weights` must be in memory while elements are read or changed.
    """

    name: str
    place: TensorBoxes
    start: int
    values: Callable[[], Tensor]
    trained: bool = False
    weights: FlatWeights | None = None


def stored_tensors(engine: Engine) -> Iterator[Stored]:
    """Yield this rank's elements of all parameters, and of the persistent buffers that have a layout.

    Other buffers are omitted, because their shapes can differ between ranks.
    """
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    in_buckets = {id(parameter) for bucket in engine.buckets for parameter in bucket.parameters}
    in_buckets |= {id(parameter) for weights in engine.weights for parameter in weights.parameters}
    # a bucket contains no part of a parameter without elements
    in_buckets -= {id(parameter) for parameter in engine.model.parameters() if not parameter.numel()}

    def place_of(parameter: nn.Parameter) -> tuple[str, TensorBoxes]:
        name = names[id(parameter)]
        return name, _place(engine, name, parameter)

    for shards in engine.shards_of_buckets:
        for index, (parameter, tensor) in enumerate(zip(shards.parameters, shards.tensors, strict=True)):
            if tensor is not None and parameter.numel():
                values, start = partial(shards.values, index), shards.starts[index]
                weights = None if shards.has_masters else shards.weights
                yield Stored(*place_of(parameter), start, values, trained=True, weights=weights)
    for frozen in engine.weights:
        if not frozen.trained:
            for parameter, part, start in frozen.ranges():
                yield Stored(*place_of(parameter), start, partial(_part_of, frozen, part), weights=frozen)
    for parameter in engine.model.parameters():
        plain = type(parameter.data) is Tensor  # quantized tensors are not part of the state
        if plain and id(parameter) not in in_buckets:
            yield Stored(*place_of(parameter), 0, parameter.detach)
    for name, buffer in persistent_buffers(engine.model):
        if engine.has_layout(name, buffer):
            yield Stored(name, _place(engine, name, buffer), 0, partial(_itself, buffer))


def _part_of(weights: FlatWeights, part: slice) -> Tensor:
    return weights.shard[part]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def set_values(found: Iterable[tuple[Stored, Tensor]]) -> None:
    """Copy each tensor in `found` to its `Stored` elements.  Offloaded weights are changed one bucket at a time."""
    for weights, members in groupby(found, key=lambda pair: pair[0].weights):
        with nullcontext() if weights is None else weights.in_memory(write=True):
            for stored, values in members:
                own = stored.values()
                own.copy_(values.view(own.shape))


class _WeightReader:
    """Reads offloaded weights, one bucket at a time."""

    def __init__(self) -> None:
        self._members: dict[FlatWeights, list[Stored]] = {}
        self._values: dict[str, Tensor] = {}

    def range_of(self, stored: Stored) -> Range:
        """Return `stored` as a range; offloaded values are read on demand."""
        values, weights = stored.values(), stored.weights
        if weights is None or not weights.is_offloaded:
            return Range.of(values, stored.start, stored.place)
        self._members.setdefault(weights, []).append(stored)
        load = partial(self._load, weights, stored.name)
        return Range(stored.place, stored.start, values.numel(), values.dtype, load=load)

    def _load(self, weights: FlatWeights, name: str) -> Tensor:
        if name not in self._values:
            self._values.clear()
            with weights.in_memory():
                self._values = {each.name: each.values().reshape(-1) for each in self._members[weights]}
        return self._values[name]


def _place(engine: Engine, name: str, tensor: Tensor) -> TensorBoxes:
    """Return the boxes of a tensor on this rank, from its layout."""
    layout = engine.layouts.get(name)
    if layout is None or not layout.shards:
        return TensorBoxes.whole(tensor.shape)
    cell = next(cell for cell in engine.mesh.of_rank(engine.rank) if cell.pipeline in layout.stages)
    return TensorBoxes.of_boxes(layout.shape, tensor.shape, layout.boxes(engine.mesh, cell))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) for each buffer in the model's `state_dict`."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _states(engine: Engine) -> Iterator[tuple[str, TensorBoxes, nn.Parameter, int, dict[str, Any]]]:
    """Yield (entry prefix, boxes, shard, start, states) for each shard whose optimizer states are in memory."""
    if engine.offloaded:
        return
    places = _places(engine)
    for number, optimizer in enumerate(engine.optimizers):
        for shard in (each for group in optimizer.param_groups for each in group["params"]):
            name, start, place = places[id(shard)]
            yield f"{_prefix(number)}.{name}", place, shard, start, optimizer.state[shard]


def _prefix(number: int) -> str:
    return f"optimizer{number}" if number else "optimizer"


def _keys_of(entries: Iterable[str]) -> defaultdict[str, list[str]]:
    """Split entry names of the form STEM/KEY; return the keys grouped by stem."""
    keys: defaultdict[str, list[str]] = defaultdict(list)
    for entry in entries:
        stem, _, key = entry.rpartition("/")
        keys[stem].append(key)
    return keys


# ---- tensors to load into ----


def _described(description: STORAGE_TYPES) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(description, TensorStorageMetadata):
        raise CheckpointError(
            f"the checkpoint is damaged: expected a tensor, found {type(description).__name__}; load another "
            "checkpoint"
        )
    return description


def _empty_as(description: STORAGE_TYPES) -> Tensor:
    """Return an uninitialized tensor with the size and dtype of a saved tensor."""
    found = _described(description)
    return torch.empty(found.size, dtype=found.properties.dtype)


def _empty_range(description: STORAGE_TYPES, place: TensorBoxes, start: int, length: int) -> Range | None:
    """Return an uninitialized range for a saved tensor; None if the tensor has a different shape."""
    found = _described(description)
    size = tuple(found.size)
    if size != place.shape:
        if size != (math.prod(place.shape),):  # earlier versions saved flattened tensors
            return None
        if not place.is_whole:
            raise CheckpointError(
                "expected tensors in their original shapes, got flattened tensors (the format of versions up to "
                "2026-11), which cannot be loaded if this rank stores only a part of a tensor; load the checkpoint with "
                "tensor=1 and expert=1, save it, and load the new checkpoint"
            )
        place = TensorBoxes.whole(size)
    return Range.of(torch.empty(length, dtype=found.properties.dtype), start, place)


def _empty_optimizer_state(
    description: STORAGE_TYPES, shard: nn.Parameter, start: int, place: TensorBoxes
) -> Tensor | Range:
    """Return an uninitialized range for an elementwise state, or a tensor for any other state."""
    by_element = _described(description).size and _empty_range(description, place, start, shard.numel())
    return by_element or _empty_as(description)


# ---- offloaded states ----


def _offloaded_state(engine: Engine, stored: Mapping[str, Tensor | Range]) -> State:
    """Return the offloaded states as ranges that are read from the offload store on demand."""
    places = _places(engine)
    state: State = {}
    for number, update in enumerate(engine.offloaded):
        reader = UnitReader(update.state)
        for unit, members in enumerate(update.state.units):
            for at, (shard, kept) in enumerate(zip(members, update.state.kept(unit), strict=True)):
                name, start, place = places[id(shard)]
                values = stored[f"model.{name}"]
                if update.state.weights and isinstance(values, Range):
                    bring = partial(_load_master, reader, unit, at)
                    # the master weight replaces the parameter in `stored`
                    state[f"model.{name}"] = replace(values, dtype=shard.dtype, held=None, load=bring)
                for key, value in kept.items():
                    entry = f"{_prefix(number)}.{name}/{key}"
                    if isinstance(value, torch.dtype):
                        load = partial(_load_state, reader, unit, at, key)
                        state[entry] = Range(place, start, shard.numel(), value, load=load)
                    elif isinstance(value, Tensor):
                        state[entry] = value
    return state


def _load_state(reader: UnitReader, unit: int, at: int, key: str) -> Tensor:
    value: Tensor = reader.states(unit)[at].state[key]
    return value.view(-1)


def _load_master(reader: UnitReader, unit: int, at: int) -> Tensor:
    return reader.states(unit)[at].weights.view(-1)


def offloaded_states(
    engine: Engine, folder: Path, loaded: Mapping[str, Tensor | Range]
) -> Iterator[tuple[OffloadedUpdate, int, list[ShardState]]]:
    """Yield (update, unit, states) for each unit of offloaded optimizer states.  This is not a collective call.

    `states` are the saved states of the unit's shards, from the checkpoint `folder`.  Only one unit is in memory
    at a time.
    """
    if not engine.offloaded:
        return
    places = _places(engine)
    from farandole.parallel.checkpoint.storage import read_metadata, read_state

    saved = read_metadata(folder).state_dict_metadata
    keys = _keys_of(saved)
    for number, update in enumerate(engine.offloaded):
        for unit, members in enumerate(update.state.units):
            stems = [f"{_prefix(number)}.{places[id(shard)][0]}" for shard in members]
            state: State = {}
            for stem, shard in zip(stems, members, strict=True):
                _, start, place = places[id(shard)]
                for entry in (f"{stem}/{key}" for key in keys[stem]):
                    state[entry] = _empty_optimizer_state(saved[entry], shard, start, place)
            if state:
                read_state(folder, state)
            records = []
            for stem, shard, elementwise in zip(stems, members, update.state.elementwise(unit), strict=True):
                states: dict[str, Any] = {}
                for key in keys[stem]:
                    found = state[f"{stem}/{key}"]
                    value = found.values if isinstance(found, Range) else found
                    # elementwise state has the shape of the shard, even if its parameter is a scalar
                    states[key] = value.view(shard.shape) if key in elementwise else value
                values = loaded[f"model.{places[id(shard)][0]}"]
                assert isinstance(values, Range)
                records.append(ShardState(values.values.to(shard.dtype).view(shard.shape), states))
            yield update, unit, records


def _places(engine: Engine) -> dict[int, tuple[str, int, TensorBoxes]]:
    """Return a dict that maps the `id` of each updated tensor to (parameter name, start, parameter's boxes)."""
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    return {
        id(shard): (names[id(parameter)], start, _place(engine, names[id(parameter)], parameter))
        for parameter, shard, start in engine.updated_tensors()
    }
