"""Horovod's collective operations on torch tensors, asynchronous ones first.

An operation is a request under a name: ranks may issue named operations in any order, and those without a name
in the same order.  The asynchronous form returns a handle for `poll` and `synchronize`; a trailing underscore means
in place.  Gradients flow through the forms that return a new tensor at once: see `gradients`.

The errors of all of them: ValueError for arguments that are wrong by themselves and before `hvd.init()`,
and for a name that is in flight; `HorovodInternalError` where ranks disagree or a rank dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.horovod.common.basics import horovod
from farandole.horovod.common.process_sets import ProcessSet, global_process_set
from farandole.horovod.engine import requests as kinds
from farandole.horovod.engine.requests import Request
from farandole.horovod.torch.submission import (
    as_group,
    reduction,
    split_rows,
    submit,
    the_output,
    the_outputs,
    with_splits,
)

Average, Sum, Adasum = kinds.AVERAGE, kinds.SUM, kinds.ADASUM
Min, Max, Product = kinds.MIN, kinds.MAX, kinds.PRODUCT

# ---- all-reduce ----


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce `tensor` over the ranks, into a new tensor of its shape."""
    agreed = _scaled(op, average, prescale_factor, postscale_factor, process_set, [tensor])
    output = torch.empty_like(tensor)
    return submit(process_set, kinds.ALLREDUCE, name, [tensor], [output], the_output, **agreed)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce `tensor` over the ranks, in place."""
    agreed = _scaled(op, average, prescale_factor, postscale_factor, process_set, [tensor])
    in_place = [tensor]
    return submit(process_set, kinds.ALLREDUCE, name, in_place, in_place, the_output, **agreed)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce several tensors, none before all of them are ready on all ranks; the result is a list."""
    group = as_group(tensors, "allreduce")
    agreed = _scaled(op, average, prescale_factor, postscale_factor, process_set, group)
    outputs = [torch.empty_like(tensor) for tensor in group]
    return submit(process_set, kinds.ALLREDUCE, name, group, outputs, the_outputs, **agreed)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The same in place."""
    group = as_group(tensors, "allreduce")
    agreed = _scaled(op, average, prescale_factor, postscale_factor, process_set, group)
    return submit(process_set, kinds.ALLREDUCE, name, group, group, the_outputs, **agreed)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce `tensor` over the ranks, in place."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: Tensor = synchronize(handle)
    return reduced


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors over the ranks, in place."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    reduced: list[Tensor] = synchronize(handle)
    return reduced


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin to sum or average sparse tensors; returns a function that waits and gives the result.

    Indices and values are gathered: what travels grows with the number of ranks, not with the dense size.
    """
    if not tensor.is_sparse:
        raise ValueError(
            "sparse_allreduce_async takes a sparse COO tensor; hvd.allreduce_async takes dense ones"
        )
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors are combined with op=Average or op=Sum, not {kinds.OP_NAMES[op]}")
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def collect() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        # checked, because other ranks' tensors may be larger than this one
        together = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=True)
        return together.coalesce()

    return collect


def _scaled(
    op: int | None,
    average: bool | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    tensors: Sequence[Tensor],
) -> dict[str, Any]:
    """The fields of the signature of a reduction."""
    return {"op": reduction(op, average, process_set, tensors), "prescale": prescale, "postscale": postscale}


# ---- all-gather ----


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to concatenate all ranks' tensors along dimension 0, in which alone they may differ."""
    return submit(process_set, kinds.ALLGATHER, name, _with_rows([tensor], "allgather"), [], the_output)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to gather several tensors; the result is a list."""
    group = _with_rows(as_group(tensors, "allgather"), "allgather")
    return submit(process_set, kinds.ALLGATHER, name, group, [], the_outputs)


def _with_rows(tensors: list[Tensor], kind: str) -> list[Tensor]:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{kind} works along the first dimension of a tensor, and a scalar has none")
    return tensors


# ---- broadcast ----


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to copy the tensor of rank `root_rank` (its number in the world) into a new tensor on all ranks."""
    root = _root(root_rank, process_set)
    outputs = [torch.empty_like(tensor)]
    return submit(process_set, kinds.BROADCAST, name, [tensor], outputs, the_output, root=root)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The same in place."""
    root, in_place = _root(root_rank, process_set), [tensor]
    return submit(process_set, kinds.BROADCAST, name, in_place, in_place, the_output, root=root)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copy the tensor of rank `root_rank` to all ranks, in place."""
    received: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return received


def _root(root_rank: int, process_set: ProcessSet) -> int:
    process_set.member()
    if root_rank not in (process_set.ranks or ()):
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set {process_set}"
        )
    return root_rank


# ---- all-to-all ----


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send rows of `tensor` to each rank and to receive rows from each.

    splits: how many rows each rank gets, a list or tensor of whole numbers; equally many if None.
    The result is the received rows, in rank order, and how many came from each rank.
    """
    process_set.member()
    counts = split_rows(tensor, splits, process_set.size())
    return submit(process_set, kinds.ALLTOALL, name, [tensor], [], with_splits, splits=counts)


# ---- reduce-scatter ----


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce `tensor` and to leave each rank its share of the rows; the first ranks get one more if need be."""
    agreed = _scattered(op, prescale_factor, postscale_factor, process_set, [tensor])
    return submit(process_set, kinds.REDUCESCATTER, name, [tensor], [], the_output, **agreed)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """The same for several tensors; the result is a list."""
    group = as_group(tensors, "reducescatter")
    agreed = _scattered(op, prescale_factor, postscale_factor, process_set, group)
    return submit(process_set, kinds.REDUCESCATTER, name, group, [], the_outputs, **agreed)


def _scattered(
    op: int, prescale: float, postscale: float, process_set: ProcessSet, tensors: list[Tensor]
) -> dict[str, Any]:
    if op == Adasum:
        raise ValueError("reducescatter does not support op=Adasum; allreduce does")
    return _scaled(op, None, prescale, postscale, process_set, _with_rows(tensors, "reducescatter"))


# ---- waiting ----


def poll(handle: int) -> bool:
    """Whether an operation is complete, so that `synchronize` will not block."""
    if handle not in horovod.handles:
        raise ValueError(f"{handle!r} is no handle of an operation that is waiting to be synchronized")
    return horovod.handles[handle][1].finished()


def synchronize(handle: int) -> Any:
    """Wait until an operation is complete and return its result; None for one that was synchronized before."""
    found = horovod.handles.pop(handle, None)
    if found is None:
        return None
    engine, request, collect = found
    engine.wait(request)
    return collect(request)


wait = synchronize


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank is here."""
    engine = process_set.member()
    request = Request(engine.name_for(kinds.BARRIER), kinds.Signature(kinds.BARRIER))
    engine.submit(request)
    engine.wait(request)


def join(device: int = -1) -> int:
    """Say that this rank has run out of data, and wait until all have; returns the rank that was the last.

    Until then this rank contributes zeros to the sums and averages of the others.  Other operations of theirs raise.

    device: as in Horovod, where zeros are allocated; here they are made where the others' tensors are.
    """
    if not isinstance(device, int):
        raise ValueError(f"device is the number of a device, or -1 for the CPU; not {device!r}")
    engine = global_process_set.member()
    engine.drain()
    request = Request(engine.name_for(kinds.JOIN), kinds.Signature(kinds.JOIN))
    engine.submit(request)
    engine.wait(request)
    return engine.last_joined
