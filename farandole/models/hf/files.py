"""Read parts of safetensors files, and write safetensors files incrementally.

A file consists of the header length (8 bytes), a JSON header, and the tensors.  The header maps each tensor's name to
its dtype, shape and byte offsets.  Unlike the safetensors library, this module reads in parallel, and directly into the
destination tensors.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from farandole._troubleshooting import see
from farandole.models.hf.fields import FolderError
from farandole.models.hf.mapping import Box, volume

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_READ_BYTES = 8 << 20
"""The number of bytes per read: large enough for full disk speed, small enough to balance the load between threads."""

_COMPARED_ELEMENTS = 4 << 20
"""The number of elements of each tensor that are in memory while tensors are compared."""

_THREADS = min(4, 2 * (os.cpu_count() or 1))

CODES = {
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
"""The name of each data type in safetensors headers."""

_TYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Entry:
    """The location, dtype and shape of a tensor in a file.

    `offset` is the file position of the tensor's first byte.
    """

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the tensor's size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Read:
    """A request to read `box` of a stored tensor into `target`, which has the box's shape and any dtype."""

    entry: Entry
    box: Box
    target: Tensor


def open_folder(folder: Path) -> dict[str, Entry]:
    """Return a dict that maps each tensor name in a folder's safetensors files to its entry.

    Raises:
        FolderError: if a file is missing, cannot be read, is truncated or damaged, or has an unsupported dtype.
    """
    if not folder.is_dir():
        found = "is not a folder" if folder.exists() else "does not exist"
        raise FolderError(f"{folder} {found}: expected a folder with {WEIGHTS} or {INDEX}")
    index, single = folder / INDEX, folder / WEIGHTS
    if single.exists():
        return read_header(single)
    if index.exists():
        places = _read_index(index)
        wanted = sorted(set(places.values()))
        outside = [name for name in wanted if Path(name).name != name]
        if outside:
            raise FolderError(
                f"{index} is damaged: expected file names without directories, got {outside[0]!r}; "
                f"download {INDEX} again"
            )
        missing = [name for name in wanted if not (folder / name).is_file()]
        if missing:
            raise FolderError(
                f"{folder} is incomplete: {len(missing)} of {len(wanted)} weight files are missing: {', '.join(missing)}; "
                f"download the missing files{see('is-incomplete')}"
            )
        entries = {name: entry for file in wanted for name, entry in read_header(folder / file).items()}
        absent = [name for name in places if name not in entries]
        if absent:
            raise FolderError(
                f"{index} lists {absent[0]}, but {places[absent[0]]} does not contain this tensor; download the folder "
                "again"
            )
        return entries
    pickled = [path.name for path in folder.glob("pytorch_model*.bin")]
    hint = (
        f"; {pickled[0]} is a pickle, which is not loaded: convert this file with transformers' save_pretrained{see('is-a-pickle-which-is-not-loaded')}"
        if pickled
        else ""
    )
    raise FolderError(f"{folder}: expected {WEIGHTS} or {INDEX}, found neither{hint}")


def _read_index(path: Path) -> dict[str, str]:
    """Return an index file's dict, which maps tensor names to file names."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}; check the file") from None
    except ValueError as error:
        raise FolderError(f"{path} is damaged: it is not JSON ({error}); download the file again") from None
    places = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise FolderError(
            f"{path} is damaged: expected an object 'weight_map' with the file name of each tensor; download the file "
            "again"
        )
    return places


def read_header(path: Path) -> dict[str, Entry]:
    """Return a dict that maps each tensor name in a safetensors file to its entry.

    Raises:
        FolderError: if the file cannot be read, is truncated or damaged, or has an unsupported dtype.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                needed = f"{8 + length} bytes" if size >= 8 else "8 bytes for its length"
                raise FolderError(
                    f"{path} is truncated: its header needs {needed}, but the file has only {size}; download "
                    f"the file again{see('is-truncated')}"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}; check the file") from None
    except ValueError as error:
        if isinstance(error, FolderError):
            raise
        raise FolderError(f"{path} is damaged: its header is not JSON; download the file again") from None
    if not isinstance(header, dict):
        raise FolderError(f"{path} is damaged: its header is not a JSON object; download the file again")
    entries: dict[str, Entry] = {}
    for name, found in header.items():
        if name == "__metadata__":
            continue
        try:
            start, end = map(_count, found["data_offsets"])
            dtype, shape = _TYPES.get(found["dtype"]), tuple(map(_count, found["shape"]))
        except (KeyError, TypeError, ValueError):
            raise FolderError(
                f"{path} is damaged: {name} lacks a valid dtype, shape or offset; download the file again"
            ) from None
        if dtype is None:
            raise FolderError(
                f"{path}: {name} has dtype {found['dtype']}, which is not supported; convert it to one of "
                f"{', '.join(_TYPES)}"
            )
        entry = Entry(path, 8 + length + start, dtype, shape)
        if end - start != entry.nbytes:
            raise FolderError(
                f"{path} is damaged: {name} has {end - start} bytes, but {found['dtype']} with shape {list(shape)} "
                f"requires {entry.nbytes}; download the file again"
            )
        if 8 + length + end > size:
            raise FolderError(
                f"{path} is truncated: {name} ends at byte {8 + length + end}, but the file ends at byte {size}; "
                f"download the file again{see('is-truncated')}"
            )
        entries[name] = entry
    _check_order(path, entries, 8 + length, size)
    return entries


def _count(value: Any) -> int:
    """Return `value` if it is a non-negative integer; otherwise raise ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _check_order(path: Path, entries: Mapping[str, Entry], start: int, size: int) -> None:
    """Raise FolderError if tensors overlap or leave bytes unused."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != start:
            what = "overlaps another tensor" if entry.offset < start else "follows unused bytes"
            raise FolderError(f"{path} is damaged: {name} {what}; download the file again")
        start += entry.nbytes
    if start != size:
        raise FolderError(
            f"{path} is damaged: {size - start} bytes follow the last tensor; download the file again"
        )


# ---- reading ----


def read(reads: Iterable[Read], progress: Callable[[int], None] | None = None) -> None:
    """Perform `reads` in several threads.

    Args:
        progress: a callback that receives the size in bytes of each finished chunk.  It runs in the calling thread.

    Raises:
        FolderError: if a file ends early or cannot be read.
    """
    opened: dict[Path, BinaryIO] = {}
    mapped: dict[Path, Tensor] = {}
    try:
        tasks: list[tuple[Callable[..., None], tuple[Any, ...], int]] = []
        for each in sorted(reads, key=lambda r: (r.entry.file, r.entry.offset)):
            if not volume(each.box):
                continue
            path = each.entry.file
            if path not in opened:
                opened[path] = path.open("rb", buffering=0)
            start = _start_if_contiguous(each.entry.shape, each.box)
            if start is not None:
                tasks += _contiguous(opened[path].fileno(), each, start)
            else:
                if path not in mapped:
                    mapped[path] = _map(opened[path])
                tasks.append((_strided, (mapped[path], each), volume(each.box) * each.entry.dtype.itemsize))
        with ThreadPoolExecutor(_THREADS) as pool:
            running = [
                (pool.submit(_without_gradients, call, *arguments), nbytes)
                for call, arguments, nbytes in tasks
            ]
            try:
                for future, nbytes in running:
                    future.result()
                    if progress is not None:
                        progress(nbytes)
            except BaseException:
                for future, _ in running:
                    future.cancel()
                raise
    except OSError as error:
        raise FolderError(
            f"{error.filename or 'a file of the model'} cannot be read: {error.strerror}; check the file"
        ) from None
    finally:
        mapped.clear()
        for file in opened.values():
            file.close()


def have_equal_values(a: Entry, b: Entry) -> bool:
    """Return whether two stored tensors have equal shapes and values, which may have different dtypes."""
    if a.shape != b.shape:
        return False
    rows, *others = a.shape
    step = max(1, _COMPARED_ELEMENTS // max(1, prod(others)))
    for start in range(0, rows, step):
        box = ((start, min(start + step, rows)), *((0, length) for length in others))
        sizes = [end - begin for begin, end in box]
        first, second = (torch.empty(sizes, dtype=torch.float64, device="cpu") for _ in range(2))
        read([Read(a, box, first), Read(b, box, second)])
        if not torch.equal(first, second):
            return False
    return True


def _without_gradients(call: Callable[..., None], *arguments: Any) -> None:
    with torch.no_grad():  # a per-thread setting
        call(*arguments)


def _start_if_contiguous(shape: Sequence[int], box: Box) -> int | None:
    """Return the flat index of the box's first element if the box is contiguous, else None."""
    start, stride, partial = 0, 1, False
    for length, (a, b) in zip(reversed(shape), reversed(box), strict=True):
        if partial and b - a != 1:
            return None
        start += a * stride
        stride *= length
        partial = partial or (a, b) != (0, length)
    return start


def _contiguous(file: int, each: Read, start: int) -> list[tuple[Callable[..., None], tuple[Any, ...], int]]:
    """Split the read of a contiguous box into tasks (function, arguments, size in bytes)."""
    entry, target = each.entry, each.target
    size, offset, count = entry.dtype.itemsize, entry.offset + start * entry.dtype.itemsize, target.numel()
    direct = target.dtype == entry.dtype and target.is_contiguous() and target.device.type == "cpu"
    if direct:
        flat = target.detach().reshape(-1).view(torch.uint8)
        return [
            (
                _into,
                (file, entry.file, offset + at, flat[at : at + _READ_BYTES]),
                min(_READ_BYTES, count * size - at),
            )
            for at in range(0, count * size, _READ_BYTES)
        ]
    if target.dim() == 0:
        target = target[None]
    rows = max(1, _READ_BYTES // max(1, size * (count // len(target))))
    row_bytes = size * (count // len(target))
    return [
        (_converted, (file, entry, offset + at * row_bytes, target[at : at + rows]), rows * row_bytes)
        for at in range(0, len(target), rows)
    ]


def _into(file: int, path: Path, offset: int, target: Tensor) -> None:
    """Read bytes into a contiguous uint8 tensor."""
    view = memoryview(target.numpy().data)
    while view:
        count = os.preadv(file, [view], offset)
        if count == 0:
            raise FolderError(
                f"{path} is truncated: it ends at byte {offset}; download the file again{see('is-truncated')}"
            )
        view, offset = view[count:], offset + count


def _converted(file: int, entry: Entry, offset: int, target: Tensor) -> None:
    """Read elements into a tensor with another dtype, layout or device."""
    buffer = torch.empty(target.shape, dtype=entry.dtype)
    _into(file, entry.file, offset, buffer.reshape(-1).view(torch.uint8))
    target.detach().copy_(buffer)


def _map(file: BinaryIO) -> Tensor:
    # a private writable mapping, because torch warns about read-only memory
    return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _strided(mapped: Tensor, each: Read) -> None:
    """Copy a non-contiguous box from the mapped file to `each.target`."""
    entry = each.entry
    data = mapped[entry.offset : entry.offset + entry.nbytes]
    if entry.offset % entry.dtype.itemsize:
        data = data.clone()
    stored = data.view(entry.dtype).view(entry.shape)
    each.target.detach().copy_(stored[tuple(slice(a, b) for a, b in each.box)])


# ---- writing ----


def divide(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide tensors into consecutive groups of at most `limit` bytes, and return the names in each group.

    `sizes` maps each name to the tensor's size in bytes.  A tensor larger than `limit` forms its own group.
    """
    groups: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not groups or used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def file_names(count: int) -> list[str]:
    """Return the file names for a model that is split into `count` files."""
    return [WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def index_of(files: Mapping[str, Sequence[str]], nbytes: int) -> str:
    """Return the JSON index for a model that is split into several files."""
    places = {name: file for file, names in files.items() for name in names}
    return json.dumps(
        {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(places.items()))}, indent=2
    )


def write_file(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    values: Callable[[Sequence[str]], Mapping[str, Tensor]],
    batch_bytes: int = 32 << 20,
) -> None:
    """Write a safetensors file, a few tensors at a time.

    Args:
        tensors: the dtype and shape of each tensor, keyed by name.
        values: a function that returns a dict of the tensors with the given names.  Each tensor is requested once.
        batch_bytes: the approximate total size in bytes of the tensors requested in one call.

    Raises:
        OSError: if the file cannot be written.
    """
    tensors = dict(
        sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
    )  # aligns the tensors in the file
    sizes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + sizes[name]
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for names in divide(sizes, batch_bytes):
            found = values(names)
            for name in names:
                tensor = found[name].detach().to("cpu", tensors[name][0]).contiguous()
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
