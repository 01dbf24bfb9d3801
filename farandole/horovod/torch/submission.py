"""From tensors to requests: the checks that need no other rank, and what a finished request gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.horovod.common.abilities import gloo_enabled
from farandole.horovod.common.basics import Collect, horovod
from farandole.horovod.common.process_sets import ProcessSet
from farandole.horovod.engine.adasum import unsuitable
from farandole.horovod.engine.requests import ADASUM, AVERAGE, OP_NAMES, SUM, Request, Signature

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
    """A request for tensors, ready to be submitted; ValueError where they cannot be communicated.

    signature: that of an earlier request for tensors of the same types and shapes, which need not be checked again.
    agreed: more fields of the signature.
    """
    first = inputs[0]
    if signature is None:
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
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{kind} of a sparse tensor is not supported; hvd.sparse_allreduce_async is, or tensor.to_dense()"
            )
        if tensor.device != inputs[0].device:
            raise ValueError(
                f"the tensors of a group lie on one device, not on {inputs[0].device} and {tensor.device}"
            )


def _check_in_place(tensors: Sequence[Tensor], kind: str) -> None:
    """Refuse what torch would refuse to write, and what would be reduced twice, before other ranks have begun."""
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ValueError(f"{kind} in place was given the same tensor twice, which would be reduced twice")
    for tensor in tensors:
        sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
        if tensor.numel() and any(size > 1 and stride == 0 for size, stride in sizes_and_strides):
            raise ValueError(
                f"{kind} in place cannot write a tensor whose elements share memory (shape {list(tensor.shape)}, "
                f"strides {list(tensor.stride())}, as from expand()); pass tensor.contiguous()"
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
    """Put a request into the engine of the process set; returns its handle."""
    engine = process_set.engine or process_set.member()
    request = make_request(name or engine.name_for(kind), kind, inputs, outputs, None, agreed)
    return horovod.hand_out(engine, request, collect)


def the_output(request: Request) -> Tensor:
    """The result of a request for one tensor."""
    return request.outputs[0]


def the_outputs(request: Request) -> list[Tensor]:
    """The results of a request for a group."""
    return list(request.outputs)


def with_splits(request: Request) -> tuple[Tensor, Tensor]:
    """The result of an all-to-all, and how many rows of it came from each rank."""
    return request.outputs[0], torch.tensor(request.received_splits, dtype=torch.int32)


def reduction(
    op: int | None, average: bool | None, process_set: ProcessSet, tensors: Sequence[Tensor]
) -> int:
    """The number of a reduction, from `op` and Horovod's older `average`."""
    if any(tensor.dtype == torch.int16 for tensor in tensors) and gloo_enabled():
        raise ValueError(
            "Gloo, which carries this job's tensors, does not reduce int16; tensor.int() can be reduced"
        )
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return AVERAGE if average else SUM
    if op is None:
        return AVERAGE
    if op not in range(len(OP_NAMES)):
        raise ValueError(
            f"op={op!r} is none of the reductions: {', '.join('hvd.' + name for name in OP_NAMES)}"
        )
    if op == ADASUM:
        problem = unsuitable(process_set.size())
        if problem:
            raise ValueError(problem)
        if not all(tensor.is_floating_point() for tensor in tensors):
            raise ValueError("Adasum is defined for floating-point tensors only")
    return op


def as_group(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """The tensors of a grouped operation; ValueError if there are none."""
    group = list(tensors)
    if not group or not all(isinstance(tensor, Tensor) for tensor in group):
        raise ValueError(f"grouped_{kind} takes a list of at least one tensor, not {tensors!r}")
    return group


def split_rows(tensor: Tensor, splits: Any, size: int) -> tuple[int, ...]:
    """How many rows of `tensor` an all-to-all sends to each of `size` ranks; equally many without `splits`."""
    if tensor.dim() == 0:
        raise ValueError("alltoall splits a tensor along its first dimension, and a scalar has none")
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
        raise ValueError(f"alltoall expects splits to be whole numbers in one dimension, not {splits!r}")
    counts = tuple(given.tolist())
    if len(counts) != size:
        raise ValueError(
            f"Number of entries in splits ({len(counts)}) does not equal number of workers ({size})."
        )
    if min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of the tensor, or one is negative: "
            f"splits {list(counts)}, first dimension {rows}"
        )
    return counts
