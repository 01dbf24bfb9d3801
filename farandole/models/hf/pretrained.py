"""Load models from Hugging Face folders, immediately or lazily, and save models to such folders."""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farandole._troubleshooting import see
from farandole.models.hf.architecture import Architecture
from farandole.models.hf.fields import Fields, FolderError
from farandole.models.hf.files import (
    CODES,
    INDEX,
    Entry,
    Read,
    divide,
    file_names,
    have_equal_values,
    index_of,
    open_folder,
    read,
    write_file,
)
from farandole.models.hf.mapping import Box, Part, Table, overlap, volume
from farandole.models.hf.registry import families
from farandole.models.meta import meta_device
from farandole.models.moe import router_buffers
from farandole.models.sequence import Transformer

CONFIG = "config.json"
EMBEDDING = "0.tokens.weight"
HEAD = "lm_head.weight"

COPIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Tokenizer and generation files, which are copied with a model."""

Request = tuple[str, Box, Tensor]
"""The name of a model tensor, a box, and a destination tensor with the box's shape."""


@dataclass(frozen=True)
class Pretrained:
    """A model's description in the Hugging Face format.

    Args:
        architecture: the model family.
        config: the model's configuration.
        values: the fields of `config.json`.
        folder: the folder from which the model was created, or None.
    """

    architecture: Architecture
    config: Any
    values: Mapping[str, Any]
    folder: Path | None = None

    @property
    def table(self) -> Table:
        """Return the table that maps model tensors to tensors in a folder."""
        return self.architecture.table(self.config)


def from_pretrained(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    lazy: bool = False,
    classes: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    **changes: Any,
) -> Transformer:
    """Create a model from a Hugging Face folder.

    Args:
        folder: a folder with `config.json` and safetensors files.  A stored head that differs from the embedding is not
            tied, whatever `tie_word_embeddings` in `config.json` is.
        dtype: the dtype for floating-point weights, by default torch's default dtype (fp32).  Router biases are always
            in fp32, as in transformers.
        lazy: whether to return a model on the meta device.  In `farandole.parallelize`, each rank then reads only its
            shards.
        classes: the number of classes of a classifier head.  Head weights that are missing from the folder, or
            have another shape there, are initialized randomly with `seed`.
        progress: a callback that receives the number of bytes read so far and the total number of bytes.
        changes: new values for configuration fields that do not affect the tensors, such as dropout=0.1.

    Returns:
        A model in training mode, on torch's default device unless `lazy` is true.

    Raises:
        FolderError: if a file is missing, damaged or incomplete, or the configuration has an unsupported field.
    """
    path = Path(folder).expanduser()
    origin, entries = _open(path, classes, changes)
    device = torch.get_default_device()
    with meta_device():
        model = origin.architecture.build(origin.config)
    model = model.to(dtype or torch.get_default_dtype())
    weights = Weights(origin, entries, model, seed, optional=classes is not None)
    model.pretrained = origin  # type: ignore[assignment]
    if lazy:
        model.weight_source = weights  # type: ignore[assignment]
        return model
    allocate(model, device)
    weights.read(
        [
            (name, tuple((0, length) for length in tensor.shape), tensor.detach())
            for name, tensor in tensors_of(model).items()
        ],
        progress,
    )
    return model


def read_config(folder: str | Path, *, with_weights: bool = True) -> Pretrained:
    """Read a model's family and configuration from a folder, without the weights.

    Args:
        with_weights: whether the caller will also read the weights.  If so, quantized weights raise FolderError.

    Raises:
        FolderError: if `config.json` is missing or damaged, or describes a model that is not supported.
    """
    path = Path(folder).expanduser()
    file = path / CONFIG
    try:
        values = json.loads(file.read_text())
    except FileNotFoundError:
        found = "does not exist" if not path.exists() else f"has no {CONFIG}"
        raise FolderError(f"{path} {found}: expected a Hugging Face model folder") from None
    except OSError as error:
        raise FolderError(f"{file} cannot be read: {error.strerror}; check the file") from None
    except ValueError as error:
        raise FolderError(f"{file} is damaged: it is not JSON ({error}); download the file again") from None
    if not isinstance(values, dict):
        raise FolderError(
            f"{file} is damaged: expected a JSON object, found {type(values).__name__}; download the file again"
        )
    name, known = str(values.get("model_type")), families()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; nearest: {near[0]}" if near else ""
        raise FolderError(
            f"{file} has model_type={values.get('model_type')!r}, which is not supported{hint} (supported: {', '.join(known)})"
        )
    architecture = known[name]
    named = values.get("architectures") or [architecture.classes[0]]
    unknown = [each for each in named if each not in architecture.classes]
    if unknown:
        raise FolderError(
            f"{file} has architectures={named}, which is not supported (supported: {', '.join(architecture.classes)})"
        )
    if values.pop("quantization_config", None) is not None and with_weights:
        raise FolderError(
            f"{file} has a quantization_config, but quantized weights are not supported; use a folder with "
            "unquantized weights"
        )
    found_fields = Fields({**architecture.defaults, **values}, str(file))
    found_fields.skip("tie_word_embeddings")
    try:
        config = architecture.read(found_fields)
    except FolderError:
        raise
    except (ValueError, TypeError) as error:
        raise FolderError(f"{file} has an invalid field: {error}") from None
    found_fields.finish()
    return Pretrained(architecture, config, values, path)


def _open(
    folder: Path, classes: int | None, changes: Mapping[str, Any]
) -> tuple[Pretrained, dict[str, Entry]]:
    origin = read_config(folder)
    entries = open_folder(folder)
    config = _untied_if_different(
        origin.architecture, origin.architecture.adapt(origin.config, entries), entries
    )
    if config != origin.config:
        values = {**origin.values, **origin.architecture.write(config)}
        origin = replace(origin, config=config, values=values)
    return with_changes(origin, classes, changes), entries


def _untied_if_different(architecture: Architecture, config: Any, entries: Mapping[str, Entry]) -> Any:
    """Return `config` with an untied head if the folder contains a head that differs from the embedding."""
    if not getattr(config, "tied", False) or HEAD not in entries:
        return config
    table = architecture.table(config)
    (embedding,) = table.parts[EMBEDDING]
    stored = {table.standard(name): entry for name, entry in entries.items()}
    if embedding.name not in stored or have_equal_values(stored[embedding.name], stored[HEAD]):
        return config
    return replace(config, tied=False)


def with_changes(origin: Pretrained, classes: int | None, changes: Mapping[str, Any]) -> Pretrained:
    """Return a copy of `origin` with `classes` classes and changed configuration fields.

    Raises:
        FolderError: if `classes` is given, but the family has no classifier.
        TypeError: if the configuration lacks a field in `changes`.
    """
    config, values = origin.config, dict(origin.values)
    if classes is not None:
        if not hasattr(config, "classes"):
            raise FolderError(
                f"classes={classes} is supported for bert and vit only, not for {origin.architecture.name}"
            )
        config = replace(config, classes=classes)
        written = origin.architecture.write(config)
        values |= {k: v for k, v in written.items() if k in ("architectures", "id2label", "label2id")}
    known = {field.name for field in fields(config)}
    if strange := sorted(changes.keys() - known):
        near = difflib.get_close_matches(strange[0], sorted(known), 1)
        raise TypeError(
            f"{type(config).__name__} has no field {strange[0]}" + (f"; nearest: {near[0]}" if near else "")
        )
    config = replace(config, **changes)
    if changes:
        values |= origin.architecture.write(config)
    return replace(origin, config=config, values=values)


def describe(model: nn.Module) -> Pretrained:
    """Return the description of a model that `from_pretrained` or a builder in `farandole.models` created.

    Raises:
        ValueError: if the model has no Hugging Face format.
    """
    origin = getattr(model, "pretrained", None)
    if isinstance(origin, Pretrained):
        return origin
    config = getattr(model, "config", None)
    for architecture in families().values():
        if config is not None and type(config) is architecture.config and architecture.matches(config):
            values = {"model_type": architecture.name, "architectures": [architecture.classes[0]]}
            return Pretrained(architecture, config, {**values, **architecture.write(config)})
    what = type(model).__name__ if config is None else f"a model with {config}"
    raise ValueError(f"{what} has no Hugging Face format: expected one of {', '.join(families())}")


# ---- reading weights ----


class Weights:
    """Reads boxes of model tensors from a folder.

    Args:
        model: the model, whose tensors may be on the meta device.
        seed: the seed for random initial weights.
        optional: whether head weights may be missing or have a different shape.  Such weights are initialized randomly.

    Raises:
        FolderError: if tensors are missing or unknown, or have an incorrect shape.
    """

    def __init__(
        self, origin: Pretrained, entries: Mapping[str, Entry], model: nn.Module, seed: int, *, optional: bool
    ) -> None:
        self.folder, self._seed = origin.folder or Path(), seed
        table = origin.table
        tensors = tensors_of(model)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        stored: dict[str, Entry] = {}
        original: dict[str, str] = {}
        for name, entry in entries.items():
            standard = table.standard(name)
            stored[standard], original[standard] = entry, name
        head = f"{len(model) - 1}." if isinstance(model, nn.Sequential) else ""
        self._parts: dict[str, list[tuple[Part, Entry]]] = {}
        self._drawn: set[str] = set()
        missing: list[str] = []
        used: set[str] = set()
        for ours, parts in table.parts.items():
            if optional and ours.startswith(head) and not self._fit(ours, parts, stored):
                self._drawn.add(ours)
                used.update(part.name for part in parts)
                continue
            found = []
            for part in parts:
                if part.name not in stored:
                    missing.append(part.name)
                    continue
                entry = stored[part.name]
                expected = part.shape(self._shapes[ours])
                if entry.shape != expected:
                    raise FolderError(
                        f"{entry.file}: {original[part.name]} has shape {list(entry.shape)}, but "
                        f"config.json requires {list(expected)}; download both files again"
                    )
                if entry.dtype.is_floating_point != tensors[ours].is_floating_point():
                    raise FolderError(
                        f"{entry.file}: {original[part.name]} has dtype {CODES[entry.dtype]}, but the model requires "
                        f"floating-point values; use a folder with unquantized weights"
                    )
                used.add(part.name)
                found.append((part, entry))
            self._parts[ours] = found
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise FolderError(
                f"{self.folder} is incomplete: found no tensor {', '.join(missing[:4])}{more}; download the folder "
                f"again{see('is-incomplete')}"
            )
        unknown = [name for name in stored if name not in used and not table.is_ignored(name)]
        if unknown:
            more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
            raise FolderError(
                f"{self.folder} has tensors that a {origin.architecture.name} model does not have: "
                f"{', '.join(unknown[:4])}{more}; check that config.json and the weights belong together"
            )

    def __contains__(self, name: str) -> bool:
        """Return whether `read` can fill the model tensor `name`, with stored or initial values."""
        return name in self._parts or name in self._drawn

    def _fit(self, ours: str, parts: Sequence[Part], stored: Mapping[str, Entry]) -> bool:
        return all(
            part.name in stored and stored[part.name].shape == part.shape(self._shapes[ours])
            for part in parts
        )

    def read(self, requests: Sequence[Request], progress: Callable[[int, int], None] | None = None) -> None:
        """Read boxes of model tensors into the destination tensors in `requests`.

        Args:
            requests: tuples of a tensor name, a box, and a destination tensor with the shape of the box.
            progress: a callback that receives the number of bytes read so far and the total number of bytes.

        Raises:
            FolderError: if a file ends early or cannot be read.
        """
        reads = []
        for name, box, target in requests:
            if name in self._drawn:
                target.copy_(self._draw(name)[tuple(slice(a, b) for a, b in box)])
                continue
            reads += list(_reads(self._parts[name], self._shapes[name], box, target))
        done, total = 0, sum(volume(each.box) * each.entry.dtype.itemsize for each in reads)

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(min(done, total), total)

        read(reads, advance)

    def _draw(self, name: str) -> Tensor:
        """Return initial values for a weight that the folder lacks or stores with another shape."""
        shape = self._shapes[name]
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
        return torch.empty(shape).normal_(std=0.02, generator=generator)


def _reads(
    parts: Sequence[tuple[Part, Entry]], shape: Sequence[int], box: Box, target: Tensor
) -> Iterator[Read]:
    for part, entry in parts:
        whole = part.box(shape)
        common = overlap(whole, box)
        if common is None:
            continue
        own = target[tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(common, box, strict=True))]
        place = [(a - at, b - at) for (a, b), (at, _) in zip(common, whole, strict=True)][part.dropped() :]
        for _ in range(part.dropped()):
            own = own[0]
        if part.transposed:
            place[-2], place[-1] = place[-1], place[-2]
            own = own.transpose(-2, -1)
        yield Read(entry, tuple(place), own)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers, keyed by name, with tied tensors listed once."""
    persistent = model.state_dict().keys()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in named.items() if name in persistent}


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate the tensors of a meta-device model on `device`.

    Parameters are uninitialized, and tied parameters stay tied.  Buffers are zero.
    """
    twins: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = twins.get(id(parameter))
                if new is None:
                    new = twins[id(parameter)] = nn.Parameter(
                        torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    )
                module._parameters[name] = new  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)


# ---- writing ----


@dataclass(frozen=True)
class Written:
    """A tensor to write to a folder.

    Args:
        name: the name in the folder.
        ours: the name of the model tensor.
        part: the table's description of the tensor.
        whole: the shape of the model tensor.
    """

    name: str
    ours: str
    part: Part
    whole: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the tensor's shape in the folder."""
        return self.part.shape(self.whole)

    @property
    def box(self) -> Box:
        """Return the box that this tensor fills in the model tensor."""
        return self.part.box(self.whole)

    def of_box(self, values: Tensor) -> Tensor:
        """Convert the model tensor's values in `box` to the tensor to write."""
        for _ in range(self.part.dropped()):
            values = values[0]
        return values.transpose(-2, -1) if self.part.transposed else values


def tensors_to_write(origin: Pretrained, shapes: Mapping[str, tuple[int, ...]]) -> list[Written]:
    """Return the tensors to write to a folder, in the order of the model's tensors."""
    return [
        Written(part.name, ours, part, shapes[ours])
        for ours, parts in origin.table.parts.items()
        for part in parts
    ]


def written_dtype(
    name: str, own: torch.dtype, dtype: torch.dtype | None, kept: Collection[str]
) -> torch.dtype:
    """Return the dtype in which to write the model tensor `name`.

    Args:
        own: the dtype of the model tensor.
        dtype: the dtype for floating-point weights, or None to write each tensor in its own dtype.
        kept: the names of the tensors that are not converted.
    """
    return dtype if dtype and own.is_floating_point and name not in kept else own


def write_description(origin: Pretrained, folder: Path, dtype: torch.dtype) -> None:
    """Write `config.json`, and copy tokenizer and generation files from the original folder, if any.

    Raises:
        OSError: if a file cannot be written.
    """
    values = {k: v for k, v in origin.values.items() if k != "torch_dtype"} | {
        "dtype": str(dtype).removeprefix("torch.")
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    if origin.folder is not None:
        for name in COPIED:
            if (origin.folder / name).is_file():
                shutil.copyfile(origin.folder / name, folder / name)


def save_pretrained(
    model: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None, file_bytes: int = 4 << 30
) -> None:
    """Write an unsharded model to a new Hugging Face folder.

    Args:
        dtype: the dtype for floating-point weights, by default the first weight's dtype.  Router biases are written in
            fp32.
        file_bytes: the maximum file size in bytes.  A larger model is split into several files with an index.

    Raises:
        FolderError: if the folder exists or cannot be written.
        ValueError: if the model has no Hugging Face format.
    """
    origin, path = describe(model), Path(folder).expanduser()
    own, routers = tensors_of(model), router_buffers(model)
    partial = path.with_name(path.name + ".partial")
    if path.exists():
        raise FolderError(f"{path} exists: expected a new folder; choose another name")
    dtype = dtype or next(model.parameters()).dtype
    written = {
        each.name: each for each in tensors_to_write(origin, {n: tuple(t.shape) for n, t in own.items()})
    }
    kinds = {
        name: (written_dtype(each.ours, own[each.ours].dtype, dtype, routers), each.shape)
        for name, each in written.items()
    }

    def values(names: Sequence[str]) -> dict[str, Tensor]:
        found = {}
        for name in names:
            each = written[name]
            found[name] = each.of_box(own[each.ours].detach()[tuple(slice(a, b) for a, b in each.box)])
        return found

    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        sizes = {
            name: volume(tuple((0, n) for n in shape)) * kind.itemsize
            for name, (kind, shape) in kinds.items()
        }
        groups = divide(sizes, file_bytes)
        files = dict(zip(file_names(len(groups)), groups, strict=True))
        for file, names in files.items():
            write_file(partial / file, {name: kinds[name] for name in names}, values)
        if len(files) > 1:
            (partial / INDEX).write_text(index_of(files, sum(sizes.values())))
        write_description(origin, partial, dtype)
        partial.rename(path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise FolderError(f"{path} cannot be written: {error.strerror}; choose another folder") from None
