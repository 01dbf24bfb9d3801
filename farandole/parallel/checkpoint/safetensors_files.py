"""The parameters and buffers of an engine as safetensors files, which other tools read, and from such files.

    model.safetensors                                        or, if they are larger than a file should be,
    model-00001-of-00003.safetensors ... and model.safetensors.index.json, as Hugging Face has them

No rank ever has the whole model in memory: ranks write the boxes that they store to a checkpoint, and each of them then makes some of
the files from it.  In the other direction each rank reads the elements that it stores, and no others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from farandole.parallel.checkpoint.errors import CheckpointError
from farandole.parallel.checkpoint.folder import agree, cause_of, partial_folder, prepare
from farandole.parallel.checkpoint.ranges import LoadPlanner, Range, SavePlanner
from farandole.parallel.checkpoint.state import Stored, set_values, state_of, stored_tensors

if TYPE_CHECKING:
    from farandole.parallel.engine import Engine

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PREFIX = "model."
_STATE = "state"


def export(engine: Engine, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
    """See `Engine.export`."""
    comm, partial = engine.comm, partial_folder(folder)
    agree(comm, prepare(folder) if comm.rank == 0 else "", folder)
    refusal = ""
    try:
        state = {k: v for k, v in state_of(engine, comm.rank).items() if k.startswith(_PREFIX)}
        writer = FileSystemWriter(partial / _STATE)
        dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=comm.group)
        names = [
            _PREFIX + name for name, _ in (*engine.model.named_parameters(), *engine.model.named_buffers())
        ]
        _write_files(partial, names, comm.rank, comm.size, dtype, file_bytes)
    except BaseException as error:  # noqa: BLE001 - torch's own is no Exception; told on all ranks
        refusal = str(cause_of(error))
    try:
        agree(comm, refusal, folder)
    except CheckpointError:
        if comm.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if comm.rank == 0:
        shutil.rmtree(partial / _STATE)
        partial.rename(folder)
    comm.barrier()


def _write_files(
    partial: Path, order: Sequence[str], rank: int, size: int, dtype: torch.dtype | None, file_bytes: int
) -> None:
    from safetensors.torch import save_file

    reader = FileSystemReader(partial / _STATE)
    found = {
        name: entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    place = {name: number for number, name in enumerate(order)}
    files = _divide(
        {name: found[name] for name in sorted(found, key=lambda n: place.get(n, len(place)))}, file_bytes
    )
    names = (
        [FILE]
        if len(files) == 1
        else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    )
    for number in range(rank, len(files), size):
        tensors = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in files[number].items()}
        dcp.load(dict(tensors), storage_reader=reader, planner=LoadPlanner(), no_dist=True)
        plain = {
            name.removeprefix(_PREFIX): tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        path = partial / names[number]
        save_file(plain, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes it readable by its owner only
    if rank == 0 and len(files) > 1:
        total = sum(_nbytes(entry) for entry in found.values())
        places = {n.removeprefix(_PREFIX): names[number] for number, file in enumerate(files) for n in file}
        (partial / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1)
        )


def _divide(
    found: Mapping[str, TensorStorageMetadata], file_bytes: int
) -> list[dict[str, TensorStorageMetadata]]:
    """The tensors of each file, in order; a file has at least one."""
    files: list[dict[str, TensorStorageMetadata]] = [{}]
    used = 0
    for name, entry in found.items():
        if files[-1] and used + _nbytes(entry) > file_bytes:
            files.append({})
            used = 0
        files[-1][name] = entry
        used += _nbytes(entry)
    return files


def _nbytes(entry: TensorStorageMetadata) -> int:
    return entry.size.numel() * entry.properties.dtype.itemsize


def load_weights(engine: Engine, path: Path) -> None:
    """See `Engine.load_weights`."""
    refusal, found = "", list[tuple[Stored, Tensor]]()
    try:
        if any(update.state.weights for update in engine.offloaded):
            raise CheckpointError(
                "the master weights are offloaded: load weights before engine.optimizer(...) is called"
            )
        found = _read(engine, path)
    except Exception as error:
        refusal = str(cause_of(error))
    agree(engine.comm, refusal, path)
    with torch.no_grad():
        set_values(found)
    engine.all_gather_parameters(frozen=True)
    engine.remember_parameters()


def _read(engine: Engine, path: Path) -> list[tuple[Stored, Tensor]]:
    """The values of what this rank stores, in the types of the files."""
    from safetensors import safe_open

    places = _files(path)
    aliases = _aliases(engine)
    found: list[tuple[Stored, Tensor]] = []
    known = {alias for names in aliases.values() for alias in names} | {
        n for n, _ in engine.model.named_buffers()
    }
    missing = [name for name, names in aliases.items() if not any(each in places for each in names)]
    unknown = [name for name in places if name not in known]
    if missing or unknown:
        parts = [f"it has no {', '.join(missing[:4])}"] * bool(missing) + [
            f"it has {', '.join(unknown[:4])}"
        ] * bool(unknown)
        raise CheckpointError(f"{' and '.join(parts)}: it is of another model")
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
    """Of each parameter, by its first name, all names that it has: files may have a tied one under another."""
    names: dict[int, list[str]] = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {found[0]: found for found in names.values()}


def _files(path: Path) -> dict[str, Path]:
    """The file that has each tensor."""
    from safetensors import safe_open

    if path.is_dir() and (path / INDEX).exists():
        places = json.loads((path / INDEX).read_text())["weight_map"]
        return {name: path / file for name, file in places.items()}
    file = path / FILE if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(f"expected {FILE} or {INDEX} in a folder, or the name of a file")
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)
