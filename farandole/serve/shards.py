"""Divide a model over the ranks of a communicator, so that each rank stores its shard of the weights."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.layout import Layout
from farandole.mesh import Mesh
from farandole.models.hf.pretrained import Request, allocate, tensors_of
from farandole.models.sequence import Transformer
from farandole.parallel import tensor
from farandole.parallel.axes import Layouts, Position
from farandole.parallel.tensor.regions import AXIS
from farandole.plan import Plan, PlanError
from farandole.serve.folder import ModelFolder, read_model
from farandole.serve.request import RequestError


@contextlib.contextmanager
def raised_together(comm: Communicator) -> Iterator[None]:
    """Raise an error of the block on all ranks: the error of the first rank that has one.

    Leaving the block is a collective call.
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
        comm: the communicator of the ranks that divide the model.
        job: the communicator of all ranks that read a model, by default `comm`.

    Raises:
        The errors of `read_model` and `shard_model`, on all ranks of `job`.
    """
    with raised_together(job or comm):
        found = read_model(folder, **options, lazy=True)
    with raised_together(job or comm):
        shard_model(found.model, comm)
    return found


def check_width(model: nn.Module, ranks: int) -> None:
    """Check on the meta device whether `ranks` ranks can divide a model.  The model cannot be used afterwards.

    Raises:
        RequestError: if the ranks cannot divide the model; the message names the nearest valid numbers of ranks.
    """
    mesh = Mesh.box(ranks, tensor=ranks)
    _apply(model.to("meta"), Position(mesh, mesh.of_rank(0)[0]))


def shard_model(model: Transformer, comm: Communicator) -> None:
    """Replace the parameters of `model` by this rank's shards.  This is a collective call.

    If the model is on the meta device, as from `from_pretrained(folder, lazy=True)`, each rank reads only its shards.

    Raises:
        RequestError: if the ranks cannot divide the model; the message names the nearest valid numbers of ranks.
        FolderError: if a file ends early or cannot be read.
    """
    mesh = Mesh.box(comm.size, tensor=comm.size)
    position = Position(mesh, mesh.of_rank(comm.rank)[0], mesh.connect(comm, [(AXIS,)]))
    layouts = _apply(model, position)
    position.connect()
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


def _apply(model: nn.Module, position: Position) -> Layouts:
    layouts = Layouts(model)
    try:
        tensor.apply(model, position, Plan(tensor=position.mesh.size), layouts)
    except PlanError as error:
        raise RequestError("tensor", str(error).partition(": ")[2]) from error
    return layouts


def _requests(name: str, values: Tensor, layout: Layout | None, position: Position) -> Iterator[Request]:
    """Yield the boxes of a tensor that this rank stores; a buffer has no layout, and is not sharded."""
    if layout is None or not layout.shards:
        yield name, tuple((0, length) for length in values.shape), values
        return
    ((_, shard),) = layout.shards
    dim, at = shard.dim % values.dim(), 0
    for box in layout.boxes(position.mesh, position.cell):
        length = box[dim][1] - box[dim][0]
        yield name, box, values.narrow(dim, at, length)
        at += length
