"""Initialize parameters: from rank 0, with a function that initializes a model block by block, or from files.

A model that is too large for one process is created on the meta device:

    with torch.device("meta"):
        model = build(config)                                   # shapes only
    engine = farandole.parallelize(model, plan, initialize=fill_block)

Parameters are first replaced by placeholders, which have a shape but no memory.  After all ranks have allocated their
shards, rank 0 computes the values block by block, and each rank copies its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.layout import Box, Layout
from farandole.memory.blocks import blocks_of
from farandole.memory.tracker import memory_tag
from farandole.mesh import Groups, Mesh
from farandole.parallel.axes import own_part
from farandole.parallel.zero.sharding import ranks_of
from farandole.parallel.zero.weights import FlatWeights, is_placeholder

Initialize = Callable[[str, nn.Module], None]
"""A function `initialize(name, block)` that fills a block's undefined parameters and buffers in place.

Rank 0 calls it for every block of `memory.blocks.blocks_of` in order, and then for each module with parameters or
buffers outside of blocks.  Tensors shared with an earlier block are already filled; changes to them are ignored.
"""


class WeightSource(Protocol):
    """A source of tensor values from which any `Box` can be read, such as `models.hf.pretrained.Weights`.

    If a model on the meta device has a source as its attribute `weight_source`, each rank reads its shards from this
    source.
    """

    @property
    def folder(self) -> Path:
        """The folder that contains the values, for error messages."""

    def __contains__(self, name: str) -> bool:
        """Return whether the source has values for a tensor."""

    def read(self, requests: Sequence[tuple[str, Box, Tensor]]) -> object:
        """Read boxes of tensors; each request is (name, box, destination tensor)."""


def is_deferred(model: nn.Module) -> bool:
    """Return whether any parameter of `model` is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def stand_in(models: Sequence[nn.Module], device: torch.device) -> dict[int, torch.dtype]:
    """Replace meta parameters with placeholders, and meta buffers with zeros on `device`.

    Tied tensors remain tied.  The models can share modules and parameters.

    Returns:
        A dict that maps the `id` of each parameter to its dtype.
    """
    placeholders: dict[int, Tensor] = {}
    for module in nn.ModuleList(models).modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in placeholders:
                    nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=device)
                    placeholders[id(parameter)] = nn.Parameter(
                        nothing.expand(parameter.shape), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = placeholders[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                placeholders.setdefault(
                    id(buffer), torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
                )
                module._buffers[name] = placeholders[id(buffer)]
    return {id(parameter): parameter.dtype for model in models for parameter in model.parameters()}


def fill_model(
    model: nn.Module,
    complete: nn.Module,
    weights: Sequence[FlatWeights],
    mesh: Mesh,
    layouts: Mapping[str, Layout],
    comm: Communicator,
    initialize: Initialize,
    types: Mapping[int, torch.dtype],
) -> None:
    """Initialize the parameters and buffers of `model` with `initialize` on rank 0.  This is a collective call.

    Args:
        complete: the model before it was divided into stages, with the same parameters.
        weights: the flat buffers of parameters; parameters outside of these buffers get separate memory.
        layouts: maps parameter names to layouts.
        types: maps the `id` of each parameter to its original dtype.
    """
    places = {id(p): (weight, index) for weight in weights for index, p in enumerate(weight.parameters)}
    known = {id(p): layouts[name] for name, p in complete.named_parameters()}
    own = {id(p) for p in model.parameters()}
    cell = mesh.of_rank(comm.rank)[0]
    filled: set[int] = set()
    for name, part, recurse in _parts(complete):
        members = list(part.parameters(recurse=recurse))
        fresh = [parameter for parameter in members if id(parameter) not in filled]
        if not fresh and not any(True for _ in part.buffers(recurse=recurse)):
            continue
        with (
            _in_memory(members, types, {key: layout.shape for key, layout in known.items()}),
            torch.no_grad(),
        ):
            if comm.rank == 0:
                with memory_tag("weights", members):
                    initialize(name, part)
            values = [parameter.data for parameter in fresh]
            buffers = [buffer for buffer in part.buffers(recurse=recurse) if id(buffer) not in filled]
            for tensor in (*values, *buffers):
                comm.broadcast(tensor, root=0)
        filled.update(id(tensor) for tensor in (*fresh, *buffers))
        found = [
            (places.get(id(parameter)), parameter, own_part(value, known[id(parameter)], mesh, cell))
            for parameter, value in zip(fresh, values, strict=True)
            if id(parameter) in own
        ]
        with torch.no_grad():
            for weight in dict.fromkeys(place[0] for place, _, _ in found if place is not None):
                with weight.in_memory(write=True):
                    for place, _, value in found:
                        if place is not None and place[0] is weight:
                            weight.set_values(place[1], value)
            for place, parameter, value in found:
                if place is None:
                    parameter.data = value
    comm.barrier()  # buffers that ranks share are complete on all ranks


def allocate(model: nn.Module, weights: Sequence[FlatWeights], types: Mapping[int, torch.dtype]) -> None:
    """Allocate uninitialized memory for placeholder parameters outside of flat buffers."""
    flat = {id(parameter) for weight in weights for parameter in weight.parameters}
    for parameter in model.parameters():
        if id(parameter) not in flat and is_placeholder(parameter):
            with memory_tag("weights", [parameter]):
                parameter.data = torch.empty(
                    parameter.shape, dtype=types[id(parameter)], device=parameter.device
                )


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (name, block, True) for each block, and then (name, module, False) for each module outside of blocks."""
    blocks = blocks_of(model)
    inside = {module for _, block in blocks for module in block.modules()}
    for name, block in blocks:
        yield name, block, True
    for name, module in model.named_modules():
        if module not in inside:
            yield name, module, False


@contextmanager
def _in_memory(
    parameters: Sequence[nn.Parameter],
    types: Mapping[int, torch.dtype],
    shapes: Mapping[int, tuple[int, ...]],
) -> Iterator[None]:
    """Return a context manager within which `parameters` have memory, original dtypes and complete shapes."""
    places = [parameter.data for parameter in parameters]
    for parameter, place in zip(parameters, places, strict=True):
        key = id(parameter)
        with memory_tag("weights", [parameter]):
            parameter.data = torch.empty(shapes[key], dtype=types[key], device=place.device)
    try:
        yield
    finally:
        for parameter, place in zip(parameters, places, strict=True):
            parameter.data = place


# ---- models in memory ----


def broadcast_parameters(
    model: nn.Module,
    mesh: Mesh,
    layouts: Mapping[str, Layout],
    groups: Groups,
    names: Collection[str] | None = None,
) -> None:
    """Broadcast each parameter and buffer from the first rank that stores it.  This is a collective call.

    Args:
        names: the names of the tensors to broadcast; None for all.
    """
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if names is not None and name not in names:
                continue
            comm = groups.of_ranks(ranks_of(mesh, layouts[name], groups.comm.rank, 0).copies)
            if comm is not None and comm.size > 1:
                for part in _stored(tensor.detach()):
                    comm.broadcast(part, root=0)


def broadcast_from_first(model: nn.Module, comm: Communicator) -> None:
    """Broadcast the parameters and buffers of an unsplit model from rank 0, except meta tensors.

    This is a collective call.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                for part in _stored(tensor.detach()):
                    comm.broadcast(part, root=0)


def _stored(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that store the values: `tensor` itself, or the parts of a quantized tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _stored(getattr(tensor, name))]
