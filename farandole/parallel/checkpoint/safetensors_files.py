"""Write parameters and buffers of an engine to safetensors files, and load them from such files.

    model.safetensors                                        or, for larger models,
    model-00001-of-00003.safetensors ... and model.safetensors.index.json, in the layout of Hugging Face

No rank has the whole model in memory.  Ranks write the boxes that they store to a checkpoint, and then each rank writes some of
the files from it, a few tensors at a time.  To load, each rank reads only the elements that it stores.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from farandole._extras import optional_import
from farandole.parallel.checkpoint.errors import CheckpointError
from farandole.parallel.checkpoint.folder import fail_on_all, partial_folder, prepare
from farandole.parallel.checkpoint.ranges import Range, SavePlanner, read_state
from farandole.parallel.checkpoint.state import Stored, set_values, state_of, stored_tensors

if TYPE_CHECKING:
    from farandole.parallel.engine import Engine

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PREFIX = "model."
_STATE = "state"

_BATCH_BYTES = 32 << 20
"""The approximate number of bytes in memory while a file is written, at least one tensor."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The names of types in the safetensors format."""

_Entries = dict[str, TensorStorageMetadata]


def export(engine: Engine, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    """Write the weights as safetensors; see `Engine.export`."""
    comm, partial = engine.comm, partial_folder(folder)
    with fail_on_all(comm, folder):
        if comm.rank == 0:
            prepare(folder)
    try:
        with fail_on_all(comm, folder):
            state = {k: v for k, v in state_of(engine, comm.rank).items() if k.startswith(_PREFIX)}
            writer = FileSystemWriter(partial / _STATE)
            dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=comm.group)
            saved = _saved(partial / _STATE, engine.model)
            files = list(_divide(saved, file_bytes))
            names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
            names = names if len(files) > 1 else [FILE]
            types = {
                name: dtype if dtype and entry.properties.dtype.is_floating_point else entry.properties.dtype
                for name, entry in saved.items()
            }
            for number in range(comm.rank, len(files), comm.size):
                _write_file(partial / names[number], partial / _STATE, files[number], types)
            if comm.rank == 0 and len(files) > 1:
                places = {
                    n.removeprefix(_PREFIX): name
                    for name, file in zip(names, files, strict=True)
                    for n in file
                }
                total = sum(entry.size.numel() * types[name].itemsize for name, entry in saved.items())
                index = {"metadata": {"total_size": total}, "weight_map": places}
                (partial / INDEX).write_text(json.dumps(index, indent=1))
    except CheckpointError:
        if comm.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if comm.rank == 0:
        shutil.rmtree(partial / _STATE)
        partial.rename(folder)
    comm.barrier()


def write_weights(path: Path, state: Path, model: nn.Module) -> None:
    """Write one file of the parameters and buffers in checkpoint `state` of `model`, in the types with which `model` computes.

    Not a collective call.
    """
    saved = _saved(state, model)
    types = {name: entry.properties.dtype for name, entry in saved.items()}
    types |= {f"{_PREFIX}{name}": tensor.dtype for name, tensor in _tensors(model)}
    _write_file(path, state, saved, types)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _saved(state: Path, model: nn.Module) -> _Entries:
    """Return the saved parameters and buffers, in the order of the model."""
    order = {f"{_PREFIX}{name}": number for number, (name, _) in enumerate(_tensors(model))}
    entries = {
        name: entry
        for name, entry in FileSystemReader(state).read_metadata().state_dict_metadata.items()
        if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    return dict(sorted(entries.items(), key=lambda item: order.get(item[0], len(order))))


def _divide(entries: _Entries, limit: int) -> Iterator[_Entries]:
    """Yield tensors of together at most `limit` bytes, or one tensor."""
    part: _Entries = {}
    used = 0
    for name, entry in entries.items():
        nbytes = entry.size.numel() * entry.properties.dtype.itemsize
        if part and used + nbytes > limit:
            yield part
            part, used = {}, 0
        part[name] = entry
        used += nbytes
    yield part


def _write_file(path: Path, state: Path, entries: _Entries, types: Mapping[str, torch.dtype]) -> None:
    """Write tensors of checkpoint `state`; safetensors' own function needs all of them in memory."""
    entries = dict(sorted(entries.items(), key=lambda item: -types[item[0]].itemsize))  # aligned in the file
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + entry.size.numel() * types[name].itemsize
        header[name.removeprefix(_PREFIX)] = {
            "dtype": _CODES[types[name]],
            "shape": list(entry.size),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in _divide(entries, _BATCH_BYTES):
            tensors = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in part.items()}
            read_state(state, tensors)
            for name, tensor in tensors.items():
                file.write(tensor.to(types[name]).reshape(-1).view(torch.uint8).numpy().data)


def load_weights(engine: Engine, path: Path) -> None:
    """Load weights from safetensors; see `Engine.load_weights`."""
    with fail_on_all(engine.comm, path):
        if any(update.state.weights for update in engine.offloaded):
            raise CheckpointError(
                "the master weights are offloaded: load weights before engine.optimizer(...) is called"
            )
        found = _read(engine, path)
    with torch.no_grad():
        set_values(found)
    engine.all_gather_parameters(frozen=True)
    engine.remember_parameters()


def _read(engine: Engine, path: Path) -> list[tuple[Stored, Tensor]]:
    """Return the values that this rank stores."""
    with optional_import():
        from safetensors import safe_open

    places, aliases = _files(path), _aliases(engine)
    found: list[tuple[Stored, Tensor]] = []
    known = {alias for names in aliases.values() for alias in names} | {
        n for n, _ in engine.model.named_buffers()
    }
    missing = [name for name, names in aliases.items() if not any(each in places for each in names)]
    unknown = [name for name in places if name not in known]
    if missing or unknown:
        lacks = [f"it has no {', '.join(missing[:4])}"] * bool(missing)
        has = [f"it has {', '.join(unknown[:4])}"] * bool(unknown)
        raise CheckpointError(f"{' and '.join(lacks + has)}: it is of another model")
    opened: dict[Path, Any] = {}
    for stored in stored_tensors(engine):
        name = next((each for each in aliases.get(stored.name, [stored.name]) if each in places), None)
        if name is None:
            continue  # a buffer
        file = places[name]
        if file not in opened:
            opened[file] = safe_open(file, framework="pt")
        part = opened[file].get_slice(name)
        shape = tuple(part.get_shape())
        if shape != stored.place.shape:
            raise CheckpointError(
                f"{name} has shape {shape} in {file.name}, and {stored.place.shape} in this model"
            )
        target = Range.of(
            torch.empty(stored.values().numel(), dtype=stored.values().dtype), stored.start, stored.place
        )
        for box, values in target.boxes():
            values.copy_(
                part[tuple(slice(start, end) for start, end in box)] if box else opened[file].get_tensor(name)
            )
        found.append((stored, target.values))
    return found


def _aliases(engine: Engine) -> dict[str, list[str]]:
    """Return all names of each parameter by its first name: files may have a tied one under another."""
    names: dict[int, list[str]] = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {found[0]: found for found in names.values()}


def _files(path: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    with optional_import():
        from safetensors import safe_open

    if path.is_dir() and (path / INDEX).exists():
        places = json.loads((path / INDEX).read_text())["weight_map"]
        return {name: path / file for name, file in places.items()}
    file = path / FILE if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(f"expected {FILE} or {INDEX} in a folder, or the name of a file")
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)
