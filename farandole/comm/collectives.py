"""Collectives on tensors as calls of the C core: addresses, counts, and copies where a tensor is not dense.

Each function looks at its tensors at once and returns a call that the lane of the group runs in its turn.
A tensor that is not contiguous is copied to one that is, inside the call, and back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.comm.dense import as_real, copy_back, readable, writable
from farandole.comm.dtypes import TYPES
from farandole.comm.host_group import HostGroup
from farandole.comm.work import Call


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _counts(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_size_t * len(tensors))(*(tensor.numel() for tensor in tensors))


def _of_type(tensor: Tensor, others: Sequence[Tensor]) -> int:
    for other in others:
        if other.dtype is not tensor.dtype:
            raise ValueError(
                f"tensors of one collective have one type, found {tensor.dtype} and {other.dtype}"
            )
    return TYPES[tensor.dtype]


def _in_place(host: HostGroup, tensors: Sequence[Tensor], core_call: Callable[[Tensor, int], int]) -> Call:
    def call(flags: int) -> None:
        with torch.no_grad():
            for tensor in tensors:
                buffer = readable(tensor)
                host.check(core_call(as_real(buffer), flags))
                copy_back([tensor], [buffer])

    return call


def barrier(host: HostGroup) -> Call:
    """Wait until every rank is here."""
    return lambda flags: host.check(host.core.frd_barrier(host.handle, flags))


def all_reduce(host: HostGroup, tensors: Sequence[Tensor], reduction: int) -> Call:
    """Reduce each tensor over all ranks, in place."""

    def core_call(t: Tensor, flags: int) -> int:
        status: int = host.core.frd_all_reduce(
            host.handle, t.data_ptr(), t.numel(), TYPES[t.dtype], reduction, flags
        )
        return status

    return _in_place(host, tensors, core_call)


def reduce(host: HostGroup, tensor: Tensor, root: int, reduction: int) -> Call:
    """Reduce over all ranks into the tensor of rank `root`."""

    def core_call(t: Tensor, flags: int) -> int:
        status: int = host.core.frd_reduce(
            host.handle, t.data_ptr(), t.numel(), TYPES[t.dtype], reduction, root, flags
        )
        return status

    return _in_place(host, [tensor], core_call)


def broadcast(host: HostGroup, tensor: Tensor, root: int) -> Call:
    """Copy the tensor of rank `root` to all ranks."""
    kind = TYPES[tensor.dtype]

    def call(flags: int) -> None:
        with torch.no_grad():
            buffer = readable(tensor) if host.rank == root else writable(tensor)
            count = buffer.numel()
            host.check(host.core.frd_broadcast(host.handle, buffer.data_ptr(), count, kind, root, flags))
            if host.rank != root:
                copy_back([tensor], [buffer])

    return call


def reduce_scatter_even(host: HostGroup, output: Tensor, tensor: Tensor, reduction: int) -> Call:
    """Reduce `tensor`, one equal part per rank, and keep this rank's part."""
    _of_type(tensor, [output])

    def call(flags: int) -> None:
        with torch.no_grad():
            source, target = as_real(readable(tensor)), writable(output)
            real = as_real(target)
            host.check(
                host.core.frd_reduce_scatter_even(
                    host.handle,
                    source.data_ptr(),
                    real.data_ptr(),
                    real.numel(),
                    TYPES[real.dtype],
                    reduction,
                    flags,
                )
            )
            copy_back([output], [target])

    return call


def reduce_scatter(host: HostGroup, output: Tensor, parts: Sequence[Tensor], reduction: int) -> Call:
    """Reduce a list of tensors, one per rank, and keep this rank's."""
    _of_type(output, parts)
    if parts[host.rank].numel() != output.numel():
        raise ValueError(
            f"reduce_scatter: the output has {output.numel()} elements, this rank's input {parts[host.rank].numel()}"
        )

    def call(flags: int) -> None:
        with torch.no_grad():
            sources, target = [as_real(readable(part)) for part in parts], writable(output)
            real = as_real(target)
            status = host.core.frd_reduce_scatter(
                host.handle,
                _pointers(sources),
                _counts(sources),
                real.data_ptr(),
                TYPES[real.dtype],
                reduction,
                flags,
            )
            host.check(status)
            copy_back([output], [target])

    return call


def all_gather_even(host: HostGroup, output: Tensor, tensor: Tensor) -> Call:
    """Concatenate every rank's tensor of the same length."""
    kind = _of_type(tensor, [output])

    def call(flags: int) -> None:
        with torch.no_grad():
            source, target = readable(tensor), writable(output)
            status = host.core.frd_all_gather_even(
                host.handle, source.data_ptr(), target.data_ptr(), source.numel(), kind, flags
            )
            host.check(status)
            copy_back([output], [target])

    return call


def all_gather(host: HostGroup, parts: Sequence[Tensor], tensor: Tensor) -> Call:
    """Collect every rank's tensor, of any length, in `parts`."""
    kind = _of_type(tensor, parts)

    def call(flags: int) -> None:
        with torch.no_grad():
            source, targets = readable(tensor), [writable(part) for part in parts]
            status = host.core.frd_all_gather(
                host.handle, source.data_ptr(), _pointers(targets), _counts(targets), kind, flags
            )
            host.check(status)
            copy_back(parts, targets)

    return call


def gather(host: HostGroup, parts: Sequence[Tensor], tensor: Tensor, root: int) -> Call:
    """Collect every rank's tensor of the same length in `parts` of rank `root`."""
    kind = _of_type(tensor, parts)
    _equal_lengths("gather", tensor, parts)

    def call(flags: int) -> None:
        with torch.no_grad():
            source, targets = readable(tensor), [writable(part) for part in parts]
            status = host.core.frd_gather(
                host.handle, source.data_ptr(), _pointers(targets), source.numel(), kind, root, flags
            )
            host.check(status)
            copy_back(parts, targets)

    return call


def scatter(host: HostGroup, output: Tensor, parts: Sequence[Tensor], root: int) -> Call:
    """Give every rank its tensor of `parts` of rank `root`."""
    kind = _of_type(output, parts)
    _equal_lengths("scatter", output, parts)

    def call(flags: int) -> None:
        with torch.no_grad():
            sources, target = [readable(part) for part in parts], writable(output)
            status = host.core.frd_scatter(
                host.handle, _pointers(sources), target.data_ptr(), target.numel(), kind, root, flags
            )
            host.check(status)
            copy_back([output], [target])

    return call


def all_to_all(host: HostGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
    """Send input j to rank j, receive output i from rank i."""
    kind = _of_type(inputs[0], [*inputs, *outputs])

    def call(flags: int) -> None:
        with torch.no_grad():
            sources, targets = [readable(part) for part in inputs], [writable(part) for part in outputs]
            status = host.core.frd_all_to_all(
                host.handle,
                _pointers(sources),
                _counts(sources),
                _pointers(targets),
                _counts(targets),
                kind,
                flags,
            )
            host.check(status)
            copy_back(outputs, targets)

    return call


def all_to_all_single(
    host: HostGroup, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int]
) -> Call:
    """`all_to_all` of the parts of two tensors, split along dimension 0."""
    outputs = _split(output, output_splits, host.size, "output")
    return all_to_all(host, outputs, _split(tensor, input_splits, host.size, "input"))


def _split(tensor: Tensor, splits: list[int], ranks: int, what: str) -> list[Tensor]:
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    rows = tensor.shape[0]
    if not splits:
        if rows % ranks:
            raise ValueError(
                f"all_to_all: the {rows} rows of the {what} do not divide among {ranks} ranks; give splits"
            )
        splits = [rows // ranks] * ranks
    if len(splits) != ranks or sum(splits) != rows:
        raise ValueError(
            f"all_to_all: the {what} splits {splits} must be {ranks} numbers whose sum is its {rows} rows"
        )
    return list(tensor.split(splits))


def _equal_lengths(call: str, tensor: Tensor, parts: Sequence[Tensor]) -> None:
    for part in parts:
        if part.numel() != tensor.numel():
            raise ValueError(
                f"{call}: all tensors have one length, found {tensor.numel()} and {part.numel()} elements"
            )
