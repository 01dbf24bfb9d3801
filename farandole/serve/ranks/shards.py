"""Shard a model across the ranks of a communicator."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.layout import Layout
from farandole.mesh import Mesh
from farandole.models.hf.pretrained import Request, allocate, tensors_of
from farandole.models.sequence import Transformer
from farandole.parallel import tensor
from farandole.parallel.axes import Layouts, Position, own_part
from farandole.parallel.tensor.regions import AXIS
from farandole.plan import Plan, PlanError
from farandole.serve.folder import ModelFolder, read_model
from farandole.serve.lora import Adapter
from farandole.serve.request import RequestError
from farandole.serve.rows import largest_of


@contextlib.contextmanager
def raised_together(comm: Communicator) -> Iterator[None]:
    """Return a context manager that raises an error on all ranks if the `with` block fails on any rank.

    A rank whose block fails raises its own error; other ranks raise the error of the lowest failed rank.  Leaving the
    context is a collective call.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error if _can_be_sent(error) else RuntimeError(f"{type(error).__name__}: {error}")
    first = next((error for error in comm.all_gather_object(own) if error is not None), None)
    if first is not None:
        raise (own or first) from None


def _can_be_sent(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # `pickle` raises any exception
        return False


def read_sharded(
    folder: Path, options: Mapping[str, Any], comm: Communicator, job: Communicator | None = None
) -> ModelFolder:
    """Read this rank's shards of a model.  This is a collective call.

    Args:
        options: the arguments of `read_model`.
        comm: the communicator of the ranks across which the model is sharded.
        job: the communicator of all ranks that read a model, by default `comm`.

    Raises:
        The errors of `read_model` and `shard_model`, on all ranks of `job`.
    """
    with raised_together(job or comm):
        found = read_model(folder, **options, lazy=True)
    with raised_together(job or comm):
        shards = shard_model(found.model, comm, found.adapters)
        largest = shards.largest_weights() if found.weights else {}
    return replace(found, adapters=shards.adapters, largest=largest)


def check_width(model: nn.Module, ranks: int) -> None:
    """Check that `model` can be sharded across `ranks` ranks.

    The model is moved to the meta device and sharded, so it cannot be used afterwards.

    Raises:
        RequestError: if the model cannot be sharded across the ranks; the message names the nearest valid plans.
    """
    mesh = Mesh.box(ranks, tensor=ranks)
    _apply(model.to("meta"), Position(mesh, mesh.of_rank(0)[0]))


@dataclass(frozen=True)
class ModelShards:
    """This rank's shards of a model.

    Args:
        adapters: this rank's shards of the LoRA adapters.
    """

    model: Transformer
    adapters: Mapping[str, Adapter]
    layouts: Layouts
    comm: Communicator

    def largest_weights(self) -> dict[str, Tensor]:
        """Return the largest absolute weight of each output, for each matrix that is sharded along its inputs.

        The keys are parameter names.  The values are maxima over all ranks, so that sharded weights are quantized like
        unsharded weights.  This is a collective call.
        """
        found = {}
        for name, parameter in self.model.named_parameters():
            layout = self.layouts.get(name)
            if layout is not None and any(shard.dim == parameter.dim() - 1 > 0 for _, shard in layout.shards):
                found[name] = largest_of(parameter.detach())
                self.comm.all_reduce(found[name], op="max")
        return found


def shard_model(
    model: Transformer, comm: Communicator, adapters: Mapping[str, Adapter] = MappingProxyType({})
) -> ModelShards:
    """Replace the parameters of `model` with this rank's shards.  This is a collective call.

    If the model is on the meta device, as returned by `from_pretrained(folder, lazy=True)`, each rank reads only its
    shards.

    Args:
        adapters: the complete LoRA adapters, keyed by name.

    Raises:
        RequestError: if the model cannot be sharded across the ranks; the message names the nearest valid plans.
        FolderError: if a file is truncated or cannot be read.
    """
    mesh = Mesh.box(comm.size, tensor=comm.size)
    position = Position(mesh, mesh.of_rank(comm.rank)[0], mesh.connect(comm, [(AXIS,)]))
    layouts = _apply(model, position)
    position.connect()
    own = {
        path: layouts.of(model.get_parameter(f"{path}.weight")) for each in adapters.values() for path in each
    }
    source: Any = getattr(model, "weight_source", None)
    if source is not None:
        allocate(model, torch.get_default_device())
        source.read(
            [
                request
                for name, values in tensors_of(model).items()
                for request in _requests(name, values.detach(), layouts.get(name), position)
            ]
        )
    own_adapters = {
        name: {path: _own_matrices(a, b, own[path], position) for path, (a, b) in adapter.items()}
        for name, adapter in adapters.items()
    }
    return ModelShards(model, own_adapters, layouts, comm)


def _own_matrices(a: Tensor, b: Tensor, weight: Layout, position: Position) -> tuple[Tensor, Tensor]:
    """Return the columns of A for this rank's inputs of a layer, and the rows of B for this rank's outputs."""

    # if the inputs are sharded, this rank's product B A x is a partial sum, like its product with the weight
    def own(matrix: Tensor, dim: int) -> Tensor:
        shards = tuple((axis, shard) for axis, shard in weight.shards if shard.dim % 2 == dim)
        layout = Layout(weight.name, tuple(matrix.shape), shards=shards)
        return own_part(matrix, layout, position.mesh, position.cell)

    return own(a, 1), own(b, 0)


def _apply(model: nn.Module, position: Position) -> Layouts:
    layouts = Layouts(model)
    try:
        tensor.apply(model, position, Plan(tensor=position.mesh.size), layouts)
    except PlanError as error:
        raise RequestError("tensor", str(error).partition(": ")[2]) from error
    return layouts


def _requests(name: str, values: Tensor, layout: Layout | None, position: Position) -> Iterator[Request]:
    """Yield a read request for each of this rank's slices of a tensor."""
    if layout is None or not layout.shards:  # buffers have no layout
        yield name, tuple((0, length) for length in values.shape), values
        return
    ((_, shard),) = layout.shards
    dim, at = shard.dim % values.dim(), 0
    for box in layout.boxes(position.mesh, position.cell):
        length = box[dim][1] - box[dim][0]
        yield name, box, values.narrow(dim, at, length)
        at += length
