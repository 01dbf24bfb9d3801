"""Provide Horovod's asynchronous and in-place collective operations on PyTorch tensors, without gradients.

Ranks may issue named operations in any order, but must issue unnamed operations in the same order.  Asynchronous
operations return a handle for `poll` and `synchronize`.  A trailing underscore in a function name marks an in-place
operation.  The module `differentiable` provides the operations with gradients.

All operations raise ValueError if an argument is invalid, if an operation with the same name is in flight, or if
`hvd.init()` has not been called.  Operations raise `HorovodInternalError` if ranks disagree or a rank dies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.horovod import requests as kinds
from farandole.horovod.basics import gloo_enabled
from farandole.horovod.execution import unsuitable_for_adasum
from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.requests import ADASUM, AVERAGE, OP_NAMES, SUM, Request, Signature
from farandole.horovod.state import Collect, horovod

SUPPORTED = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
    }
)


def make_request(
    name: str,
    kind: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    signature: Signature | None,
    agreed: dict[str, Any],
) -> Request:
    """Create a request for a collective operation on tensors.

    Args:
        name: The name of the operation.
        kind: The operation kind.
        inputs: The tensors to read.
        outputs: The tensors to write; `inputs` itself for an in-place operation.
        signature: The signature of an earlier request for tensors with the same dtypes and shapes, or None.  With a
            signature, the tensors are not checked again.
        agreed: Additional signature fields, on which all ranks must agree.

    Raises:
        ValueError: if the tensors cannot be communicated, or the name is not a string.
    """
    first = inputs[0]
    if signature is None:
        if not isinstance(name, str):
            raise ValueError(
                f"{kind}: expected name to be a string or None, got {name!r}; try name={str(name)!r}"
            )
        _check(inputs, kind)
        if outputs is inputs:
            _check_in_place(outputs, kind)
        types = tuple([tensor.dtype for tensor in inputs])
        shapes = tuple([tensor.shape for tensor in inputs])
        signature = Signature(kind, types, shapes, first.device.type, **agreed)
    request = Request(name, signature, inputs, outputs)
    if signature.device != "cpu":
        request.event = torch.Event(signature.device)
        request.event.record()
    return request


def _check(inputs: Sequence[Tensor], kind: str) -> None:
    for tensor in inputs:
        if tensor.dtype not in SUPPORTED:
            raise ValueError(
                f"Tensor type {tensor.type()} is not supported. Convert the tensor to a supported dtype: "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in sorted(SUPPORTED, key=str))}"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{kind} of a sparse tensor is not supported; use hvd.sparse_allreduce_async or tensor.to_dense()"
            )
        if tensor.device != inputs[0].device:
            raise ValueError(
                f"expected all tensors in a group to be on one device, got {inputs[0].device} and {tensor.device}"
            )


def _check_in_place(tensors: Sequence[Tensor], kind: str) -> None:
    """Raise ValueError if a tensor is repeated, or the elements of a tensor share memory."""
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ValueError(
            f"in-place {kind} got the same tensor twice and would reduce it twice; pass each tensor once"
        )
    for tensor in tensors:
        sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
        if tensor.numel() and any(size > 1 and stride == 0 for size, stride in sizes_and_strides):
            raise ValueError(
                f"in-place {kind} cannot write to a tensor whose elements share memory, such as a result of expand() "
                f"(shape {list(tensor.shape)}, strides {list(tensor.stride())}); use a contiguous tensor"
            )


def submit(
    process_set: ProcessSet,
    kind: str,
    name: str | None,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    collect: Collect,
    **agreed: Any,
) -> int:
    """Submit a request to the process set's engine and return its handle.

    Args:
        process_set: The participating ranks.
        kind: The operation kind.
        name: The name of the operation, or None to generate a name.
        inputs: The tensors to read.
        outputs: The tensors to write; `inputs` itself for an in-place operation.
        collect: A function that takes the finished request and returns the operation's result.
        agreed: Additional signature fields, on which all ranks must agree.
    """
    engine = process_set.engine or process_set.member()
    request = make_request(name or engine.name_for(kind), kind, inputs, outputs, None, agreed)
    return horovod.submit(engine, request, collect)


def the_output(request: Request) -> Tensor:
    """Return the result of a single-tensor request."""
    return request.outputs[0]


def the_outputs(request: Request) -> list[Tensor]:
    """Return the results of a grouped request."""
    return list(request.outputs)


def with_splits(request: Request) -> tuple[Tensor, Tensor]:
    """Return the result of an all-to-all, and the number of rows received from each rank."""
    return request.outputs[0], torch.tensor(request.received_splits, dtype=torch.int32)


def reduction(
    op: int | None, average: bool | None, process_set: ProcessSet, tensors: Sequence[Tensor]
) -> int:
    """Return the reduction selected by `op` or by Horovod's older argument `average`.

    Raises:
        ValueError: if `op` and `average` are both given, `op` is invalid, or the reduction does not support the
            tensors' dtypes or the number of ranks.
    """
    if any(tensor.dtype == torch.int16 for tensor in tensors) and gloo_enabled():
        raise ValueError(
            "Gloo, which this job uses, does not support int16 reductions; convert the tensor with tensor.int()"
        )
    if average is not None:
        if op is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them. "
                f"Got op={op!r}, average={average!r}"
            )
        return AVERAGE if average else SUM
    if op is None:
        return AVERAGE
    if not isinstance(op, int) or op not in range(len(OP_NAMES)):
        raise ValueError(
            f"op={op!r} is not supported; use one of {', '.join('hvd.' + name for name in OP_NAMES)}"
        )
    if op == ADASUM:
        problem = unsuitable_for_adasum(process_set.size())
        if problem:
            raise ValueError(problem)
        if not all(tensor.is_floating_point() for tensor in tensors):
            odd = next(tensor.dtype for tensor in tensors if not tensor.is_floating_point())
            raise ValueError(
                f"Adasum supports floating-point tensors only, got {odd}; convert the tensor or use another op"
            )
    return op


def as_group(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """Return the tensors of a grouped operation as a list.

    Raises:
        ValueError: if there are no tensors, or an object is not a tensor.
    """
    group = list(tensors)
    if not group or not all(isinstance(tensor, Tensor) for tensor in group):
        raise ValueError(f"grouped_{kind}: expected a list of at least one tensor, got {tensors!r}")
    return group


def split_rows(tensor: Tensor, splits: Any, size: int) -> tuple[int, ...]:
    """Return the number of rows that an all-to-all sends to each rank: `splits`, or equal numbers by default."""
    if tensor.dim() == 0:
        raise ValueError("alltoall: expected a tensor with at least one dimension, got a scalar")
    rows = tensor.shape[0]
    if splits is None or (isinstance(splits, Tensor) and splits.numel() == 0):
        if rows % size:
            raise ValueError(
                f"If splits is not provided, the first dimension of the tensor ({rows}) must be divisible by the "
                f"number of ranks ({size})."
            )
        return (rows // size,) * size
    given = splits if isinstance(splits, Tensor) else torch.tensor(splits)
    if given.is_floating_point() or given.dim() != 1:
        raise ValueError(
            f"alltoall: expected splits to be a one-dimensional list or tensor of integers, got {splits!r}"
        )
    counts = tuple(given.tolist())
    if len(counts) != size:
        raise ValueError(
            f"Number of entries in splits ({len(counts)}) does not equal number of workers ({size})."
        )
    if min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of the tensor, or an entry is negative: "
            f"splits {list(counts)}, first dimension {rows}"
        )
    return counts


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
    """Start reducing `tensor` across ranks.  The result is a new tensor.  See `allreduce` for the arguments.

    Returns:
        A handle for `poll` and `synchronize`.
    """
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
    """Start reducing `tensor` across ranks, in place; return a handle."""
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
    """Start reducing several tensors across ranks in one operation; return a handle.

    The reduction starts when all tensors are ready on all ranks.
    """
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
    """Start reducing several tensors across ranks in one operation, in place; return a handle."""
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
    """Reduce `tensor` across ranks, in place."""
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
    """Reduce several tensors across ranks, in place."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    reduced: list[Tensor] = synchronize(handle)
    return reduced


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start summing or averaging a sparse tensor across ranks.

    The operation gathers the indices and values from all ranks.  The traffic does not depend on the size of the dense
    tensor.

    Args:
        tensor: A sparse COO tensor.
        name: The name of the operation.
        op: Sum or Average.
        process_set: The participating ranks.

    Returns:
        A function that waits for the operation and returns the result, a coalesced sparse tensor.

    Raises:
        ValueError: if `tensor` is not sparse, or `op` is neither Sum nor Average.
    """
    if not tensor.is_sparse:
        raise ValueError(
            f"expected a sparse COO tensor, got a {tensor.layout} tensor; use hvd.allreduce_async for dense tensors"
        )
    if op not in (Average, Sum):
        raise ValueError(
            f"sparse tensors can be reduced only with op=Average or op=Sum, got op={kinds.OP_NAMES[op]}"
        )
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    # under the plain name, so that a dense all-reduce of the same tensor on another rank raises an error
    values = allgather_async(tensor._values(), name, process_set)

    def collect() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        # check the indices, because other ranks' tensors may be larger than this rank's tensor
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
    """Return the fields `op`, `prescale` and `postscale` of a reduction's signature."""
    return {
        "op": reduction(op, average, process_set, tensors),
        "prescale": _finite("prescale_factor", prescale),
        "postscale": _finite("postscale_factor", postscale),
    }


def _finite(name: str, value: Any) -> float:
    """Convert `value` to a float, and raise ValueError if the result is not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"expected {name} to be a finite number, got {value!r}; use 1.0 to disable scaling")
    return number


# ---- all-gather ----


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start concatenating the tensors from all ranks along dimension 0; return a handle.

    Raises:
        ValueError: if the tensor is a scalar.
    """
    return submit(process_set, kinds.ALLGATHER, name, _with_rows([tensor], "allgather"), [], the_output)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start all-gathering several tensors in one operation; return a handle.

    Raises:
        ValueError: if a tensor is a scalar.
    """
    group = _with_rows(as_group(tensors, "allgather"), "allgather")
    return submit(process_set, kinds.ALLGATHER, name, group, [], the_outputs)


def _with_rows(tensors: list[Tensor], kind: str) -> list[Tensor]:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{kind}: expected tensors with at least one dimension, got a scalar")
    return tensors


# ---- broadcast ----


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start copying rank `root_rank`'s tensor to a new tensor on each rank; return a handle.

    Raises:
        ValueError: if `root_rank` is not in the process set.
    """
    root = _root(root_rank, process_set)
    outputs = [torch.empty_like(tensor)]
    return submit(process_set, kinds.BROADCAST, name, [tensor], outputs, the_output, root=root)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start copying rank `root_rank`'s tensor to all ranks, in place; return a handle.

    Raises:
        ValueError: if `root_rank` is not in the process set.
    """
    root, in_place = _root(root_rank, process_set), [tensor]
    return submit(process_set, kinds.BROADCAST, name, in_place, in_place, the_output, root=root)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copy rank `root_rank`'s tensor to all ranks, in place."""
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
    """Start sending some rows of a tensor to each rank, and receiving rows from each rank.

    Args:
        tensor: The rows to send, ordered by destination rank.
        splits: The number of rows to send to each rank (a list or tensor of integers), or None for equal numbers.
        name: The name of the operation.
        process_set: The participating ranks.

    Returns:
        A handle.  `synchronize` returns the received rows, ordered by source rank, and the number of rows from each
        rank.
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
    """Start reducing `tensor` across ranks and scattering the rows of the result; return a handle.

    If the rows cannot be divided equally, the lowest ranks each get one extra row.

    Raises:
        ValueError: if the tensor is a scalar, or `op` is Adasum.
    """
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
    """Start reducing several tensors across ranks and scattering the rows of each result; return a handle.

    Raises:
        ValueError: if a tensor is a scalar, or `op` is Adasum.
    """
    group = as_group(tensors, "reducescatter")
    agreed = _scattered(op, prescale_factor, postscale_factor, process_set, group)
    return submit(process_set, kinds.REDUCESCATTER, name, group, [], the_outputs, **agreed)


def _scattered(
    op: int, prescale: float, postscale: float, process_set: ProcessSet, tensors: list[Tensor]
) -> dict[str, Any]:
    if op == Adasum:
        raise ValueError("reducescatter does not support op=Adasum; use allreduce")
    return _scaled(op, None, prescale, postscale, process_set, _with_rows(tensors, "reducescatter"))


# ---- waiting ----


def poll(handle: int) -> bool:
    """Return whether an operation is complete.

    Raises:
        ValueError: if `handle` is unknown, or `synchronize` was already called for `handle`.
    """
    if handle not in horovod.handles:
        raise ValueError(
            f"expected the handle of an operation that has not been synchronized yet, got {handle!r}"
        )
    return horovod.handles[handle][1].finished()


def synchronize(handle: int) -> Any:
    """Wait until an operation is complete and return its result.

    Args:
        handle: The handle of the operation.

    Returns:
        The result: a tensor, a list of tensors for a grouped operation, or a pair for an all-to-all.  None if
        `synchronize` was already called for the handle.

    Raises:
        HorovodInternalError: if ranks disagree, a rank died, or Horovod was shut down.
    """
    found = horovod.handles.pop(handle, None)
    if found is None:
        return None
    engine, request, collect = found
    engine.wait(request)
    return collect(request)


wait = synchronize


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called `barrier`."""
    engine = process_set.member()
    request = Request(engine.name_for(kinds.BARRIER), kinds.Signature(kinds.BARRIER))
    engine.submit(request)
    engine.wait(request)


def join(device: int = -1) -> int:
    """Report that this rank has run out of data, and wait until all ranks have joined.

    While this rank waits, it contributes zeros to Sum and Average all-reduces and takes part in barriers.  Other
    operations raise an exception on the other ranks.

    Args:
        device: Ignored.  In Horovod, the device on which the zeros are allocated.

    Returns:
        The last rank to join.
    """
    if not isinstance(device, int):
        raise ValueError(f"expected device to be a device number or -1 for the CPU, got {device!r}")
    engine = global_process_set.member()
    engine.drain()
    request = Request(engine.name_for(kinds.JOIN), kinds.Signature(kinds.JOIN))
    engine.submit(request)
    engine.wait(request)
    return engine.last_joined
