"""Write an engine's weights as safetensors files or as a Hugging Face folder, and load weights from such files.

    model.safetensors                                        or, for larger models,
    model-00001-of-00003.safetensors ... and model.safetensors.index.json, in the layout of Hugging Face

No rank holds the unsharded model.  To write, all ranks first save a temporary checkpoint.  From this checkpoint,
each rank then writes some of the files, a few tensors at a time.  To load, each rank reads only the elements that
it stores, directly into the engine's memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from farandole._troubleshooting import see
from farandole.layout import Box
from farandole.models.hf.fields import FolderError
from farandole.models.hf.files import (
    INDEX,
    WEIGHTS,
    Entry,
    Read,
    divide,
    file_names,
    index_of,
    open_folder,
    read,
    read_header,
    write_file,
)
from farandole.models.hf.mapping import Part
from farandole.models.hf.pretrained import (
    Written,
    describe,
    tensors_to_write,
    write_description,
    written_dtype,
)
from farandole.models.moe import router_buffers
from farandole.parallel.checkpoint.errors import CheckpointError
from farandole.parallel.checkpoint.folder import fail_on_all, partial_folder, prepare
from farandole.parallel.checkpoint.ranges import Range, TensorBoxes
from farandole.parallel.checkpoint.state import Stored, state_of, stored_tensors
from farandole.parallel.lora.adapters import lora_layers
from farandole.parallel.lora.quantized import is_wrapper
from farandole.parallel.zero.initial_values import WeightSource

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from farandole.parallel.engine import Engine
    from farandole.parallel.zero.weights import FlatWeights

FILE = WEIGHTS
_PREFIX = "model."
_STATE = "state"

_CACHED_BYTES = 64 << 20
"""The maximum size of a tensor that is kept in memory while its parts are written."""

_Entries = dict[str, "TensorStorageMetadata"]


# ---- writing ----


def export(engine: Engine, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Write the weights as safetensors files with the model's tensor names; see `Engine.export`."""

    def tensors(saved: _Entries) -> list[Written]:
        return [_same(name, entry) for name, entry in saved.items()]

    _write(engine, folder, tensors, dtype, file_bytes)


def save_pretrained(engine: Engine, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Write a Hugging Face folder; see `Engine.save_pretrained`."""
    origin = describe(engine.model)
    quantized = [path for path, layer in lora_layers(engine.model).items() if is_wrapper(layer.weight)]
    if quantized:
        raise ValueError(
            f"save_pretrained requires weights in full precision, but the weights of {quantized[0]} are quantized; "
            "save the adapter with save_adapter"
        )

    def tensors(saved: _Entries) -> list[Written]:
        return tensors_to_write(origin, {name: tuple(entry.size) for name, entry in saved.items()})

    _write(engine, folder, tensors, dtype, file_bytes, partial(write_description, origin))


def write_weights(path: Path, state: Path, types: Mapping[str, torch.dtype]) -> None:
    """Write the parameters and buffers in checkpoint folder `state` to the file `path`; call this on one rank.

    Args:
        types: the new dtypes of the tensors to convert, by name; other tensors keep their saved dtypes.
    """
    saved, reader = _saved(state, types), _StateReader(state, {})
    types = {name: entry.properties.dtype for name, entry in saved.items()} | dict(types)
    written = {name: _same(name, entry) for name, entry in saved.items()}
    write_file(
        path,
        {n: (types[n], each.shape) for n, each in written.items()},
        lambda names: reader.read(written, names),
    )


def _write(
    engine: Engine,
    folder: Path,
    tensors: Callable[[_Entries], list[Written]],
    dtype: torch.dtype | None,
    file_bytes: int,
    describe_model: Callable[[Path, torch.dtype], None] = lambda path, dtype: None,
) -> None:
    """Write the tensors selected by `tensors` to a new folder.  This is a collective call."""
    from farandole.parallel.checkpoint.storage import write_state

    comm, temporary = engine.comm, partial_folder(folder)
    scalings: dict[str, float] = {}
    routers: set[str] = set()
    for stage in comm.all_gather_object((lora_scalings(engine.model), router_buffers(engine.model))):
        scalings |= stage[0]
        routers |= stage[1]
    with fail_on_all(comm, folder):
        if comm.rank == 0:
            prepare(folder)
    try:
        with fail_on_all(comm, folder):
            state = {k: v for k, v in state_of(engine, comm.rank).items() if k.startswith(_PREFIX)}
            write_state(temporary / _STATE, state, comm.group)
            saved = _saved(temporary / _STATE, engine.layouts)
            written = {each.name: each for each in tensors(saved)}
            kinds = {
                name: (
                    written_dtype(each.ours, saved[each.ours].properties.dtype, dtype, routers),
                    each.shape,
                )
                for name, each in written.items()
            }
            sizes = {name: prod(shape) * kind.itemsize for name, (kind, shape) in kinds.items()}
            groups = divide(sizes, file_bytes)
            files = dict(zip(file_names(len(groups)), groups, strict=True))
            reader = _StateReader(temporary / _STATE, scalings)
            for file in list(files)[comm.rank :: comm.size]:
                own = {name: kinds[name] for name in files[file]}
                write_file(temporary / file, own, lambda names: reader.read(written, names))
            if comm.rank == 0:
                if len(files) > 1:
                    (temporary / INDEX).write_text(index_of(files, sum(sizes.values())))
                describe_model(temporary, next(kind for kind, _ in kinds.values() if kind.is_floating_point))
    except CheckpointError:
        if comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if comm.rank == 0:
        shutil.rmtree(temporary / _STATE)
        temporary.rename(folder)
    comm.barrier()


def _same(name: str, entry: TensorStorageMetadata) -> Written:
    return Written(name, name, Part(name), tuple(entry.size))


def _saved(state: Path, names: Iterable[str]) -> _Entries:
    """Return the metadata of the saved parameters and buffers by name, in the order of `names`."""
    from farandole.parallel.checkpoint.storage import read_metadata, tensors_in

    order = {name: number for number, name in enumerate(names)}
    entries = {
        name.removeprefix(_PREFIX): entry
        for name, entry in tensors_in(read_metadata(state)).items()
        if name.startswith(_PREFIX)
    }
    return dict(sorted(entries.items(), key=lambda item: order.get(item[0], len(order))))


def lora_scalings(model: nn.Module) -> dict[str, float]:
    """Return a dict that maps names of adapted weights to the scalings of their unmerged LoRA adapters."""
    return {
        f"{path}.weight": layer.lora.scaling for path, layer in lora_layers(model).items() if not layer.merged
    }


class _StateReader:
    """Reads tensors from a checkpoint, and merges LoRA adapters into Hugging Face tensors."""

    def __init__(self, folder: Path, scalings: Mapping[str, float]) -> None:
        from farandole.parallel.checkpoint.storage import read_metadata, tensors_in

        self._folder, self._scalings = folder, scalings
        self._metadata = read_metadata(folder)
        self._entries = tensors_in(self._metadata)
        self._cached: tuple[str, Tensor] | None = None

    def read(self, written: Mapping[str, Written], names: Sequence[str]) -> dict[str, Tensor]:
        return {name: written[name].of_box(self._box(written[name])) for name in names}

    def _box(self, each: Written) -> Tensor:
        entry = self._entries[_PREFIX + each.ours]
        nbytes = entry.size.numel() * entry.properties.dtype.itemsize
        slices = tuple(slice(start, end) for start, end in each.box)
        if nbytes <= _CACHED_BYTES:
            if self._cached is None or self._cached[0] != each.ours:
                self._cached = (each.ours, self._read(each.ours, Part(each.ours).box(each.whole)))
            values = self._cached[1][slices]
        else:
            values = self._read(each.ours, each.box)
        if each.ours in self._scalings and each.name != each.ours:
            path = each.ours.removesuffix(".weight")
            a, b = (self._read_all(f"{path}.lora_{kind}") for kind in "AB")
            rows, columns = b[(*slices[:-1], slice(None))], a[(*slices[:-2], slice(None), slices[-1])]
            update = (rows.float() @ columns.float()).mul_(self._scalings[each.ours])
            values = (values.float() + update).to(values.dtype)
        return values

    def _read_all(self, name: str) -> Tensor:
        entry = self._entries[_PREFIX + name]
        return self._read(name, tuple((0, length) for length in entry.size))

    def _read(self, name: str, box: Box) -> Tensor:
        from farandole.parallel.checkpoint.storage import read_state

        entry = self._entries[_PREFIX + name]
        sizes = [end - start for start, end in box]
        values = torch.empty(sizes, dtype=entry.properties.dtype)
        target = (
            Range.of(values, 0, TensorBoxes.of_boxes(tuple(entry.size), sizes, [box])) if sizes else values
        )
        read_state(self._folder, {_PREFIX + name: target}, self._metadata)
        return values


# ---- reading ----


@dataclass(frozen=True)
class _Files:
    """The entries of safetensors files, keyed by the model's tensor names."""

    entries: Mapping[str, Entry]
    folder: Path

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def read(self, requests: Sequence[tuple[str, Box, Tensor]]) -> None:
        read(Read(self.entries[name], box, target) for name, box, target in requests)


def read_weights(engine: Engine, source: WeightSource) -> None:
    """Read this rank's parameters and buffers from `source` into the engine's memory.

    This is a collective call.  Tensors that are not in `source` keep their values.

    Raises:
        CheckpointError: on all ranks, if any rank cannot read a file.
    """
    with fail_on_all(engine.comm, source.folder), torch.no_grad():
        for weights, members in groupby(stored_tensors(engine), key=_offloaded):
            with nullcontext() if weights is None else weights.in_memory(write=True):
                source.read(
                    [request for stored in members if stored.name in source for request in _requests(stored)]
                )
    engine.all_gather_parameters(frozen=True)
    engine.remember_parameters()


def _offloaded(stored: Stored) -> FlatWeights | None:
    """Return the offloaded weights that contain `stored`, or None."""
    return stored.weights if stored.weights is not None and stored.weights.is_offloaded else None


def _requests(stored: Stored) -> Iterator[tuple[str, Box, Tensor]]:
    values = stored.values()
    if values.is_contiguous():
        for box, part in Range.of(values, stored.start, stored.place).boxes():
            yield stored.name, box, part
    else:  # an unsharded channels_last tensor, which flattening would copy
        for local, box in stored.place.regions:
            yield stored.name, box, values[tuple(slice(start, end) for start, end in local)]


def load_weights(engine: Engine, path: Path) -> None:
    """Load weights from safetensors; see `Engine.load_weights`."""
    with fail_on_all(engine.comm, path):
        if any(update.state.weights for update in engine.offloaded):
            raise CheckpointError(
                "cannot load weights after the master weights were offloaded; load them before "
                "engine.optimizer(...) is called"
            )
        source = _matching(engine, _entries(path), path)
    read_weights(engine, source)


def _matching(engine: Engine, entries: Mapping[str, Entry], path: Path) -> _Files:
    """Return `entries` keyed by the model's tensor names; raise `CheckpointError` if names or shapes differ."""
    aliases, optional = _names(engine)
    known = {alias for names in aliases.values() for alias in names} | optional
    missing = [name for name, names in aliases.items() if not any(each in entries for each in names)]
    unknown = [name for name in entries if name not in known]
    if missing or unknown:
        lacks = [f"{', '.join(missing[:4])} missing"] * bool(missing)
        has = [f"{', '.join(unknown[:4])} unexpected"] * bool(unknown)
        raise CheckpointError(
            f"the checkpoint belongs to another model: {' and '.join(lacks + has)}; load a checkpoint of this model{see('belongs-to-another-model')}"
        )
    found = {}
    for stored in stored_tensors(engine):
        name = next((each for each in aliases.get(stored.name, [stored.name]) if each in entries), None)
        if name is None:
            continue  # it is optional
        entry = entries[name]
        if entry.shape != stored.place.shape:
            raise CheckpointError(
                f"{name} has shape {entry.shape} in {entry.file.name}, but {stored.place.shape} in this model; load a "
                f"checkpoint of this model{see('belongs-to-another-model')}"
            )
        found[stored.name] = entry
    return _Files(found, path)


def _names(engine: Engine) -> tuple[dict[str, list[str]], set[str]]:
    """Gather all names of each parameter, keyed by its first name, and the set of optional tensor names."""
    names: dict[int, list[str]] = {}  # files can list a tied parameter under any of its names
    # buffers and empty parameters, which files need not contain
    own_optional = {name for name, _ in engine.model.named_buffers()}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        if parameter.numel():
            names.setdefault(id(parameter), []).append(name)
        else:
            own_optional.add(name)
    own = {found[0]: found for found in names.values()}, own_optional
    aliases: dict[str, dict[str, None]] = {}
    optional: set[str] = set()
    for of_rank, more in engine.comm.all_gather_object(own):
        for first, found in of_rank.items():
            aliases.setdefault(first, {}).update(dict.fromkeys(found))
        optional |= more
    return {first: list(found) for first, found in aliases.items()}, optional


def _entries(path: Path) -> dict[str, Entry]:
    """Return the tensor entries of a safetensors file or folder, by tensor name."""
    try:
        if path.is_dir():
            if not (path / INDEX).exists() and not (path / FILE).exists():
                raise CheckpointError(
                    f"expected a folder with {FILE} or {INDEX}, found neither; check the path"
                )
            return open_folder(path)
        if not path.exists():
            raise CheckpointError(
                f"the path does not exist: expected a safetensors file, or a folder with {FILE} or {INDEX}"
            )
        return read_header(path)
    except FolderError as error:
        raise CheckpointError(str(error).removeprefix(f"{path} is ")) from None
