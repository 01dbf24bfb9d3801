"""Conversion of arbitrary tensors to dense tensors and back.

The communication library accesses only dense tensors: contiguous tensors in memory that the library can address,
without a lazy negation or conjugation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

reachable = {"cpu"}
"""The devices whose memory the communication library can address; other tensors are copied to the host and back."""


def is_dense(tensor: Tensor, any_device: bool = False) -> bool:
    """Return whether a tensor is contiguous and addressable, with no lazy negation or conjugation.

    If `any_device` is set, a tensor on any device counts as addressable, and every tensor that is not strided, such as
    a sparse tensor, counts as dense.
    """
    if any_device and tensor.layout is not torch.strided:
        return True  # torch's own groups accept sparse tensors
    return (
        (tensor.is_cpu or any_device or tensor.device.type in reachable)
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def separate_elements(call: str, outputs: Sequence[Tensor]) -> None:
    """Raise ValueError if elements of an output overlap in memory, as in an expanded tensor."""
    for output in outputs:
        if output.layout is not torch.strided:
            continue
        if any(
            not stride and length > 1 for stride, length in zip(output.stride(), output.shape, strict=True)
        ):
            raise ValueError(
                f"{call}: expected an output whose elements do not overlap, got shape {list(output.shape)} with "
                f"strides {list(output.stride())}; use the result of contiguous()"
            )


def plain(tensor: Tensor) -> Tensor:
    """Return `tensor`, or the completed result if `tensor` is the pending result of a functional collective.

    Raises:
        TypeError: if `tensor` has no memory of its own: a fake tensor, or a wrapper such as a DTensor.
    """
    if type(tensor) is Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return tensor
    if isinstance(tensor, FakeTensor):
        raise TypeError(
            "expected a tensor with values, got a fake tensor, which has only a shape; do not call collectives "
            "in a dry run"
        )
    if not tensor.numel() or tensor.data_ptr():
        return tensor
    wait = getattr(tensor, "trigger_wait", None)  # AsyncCollectiveTensor
    if wait is None:
        raise TypeError(
            f"expected a tensor that owns its memory, got {type(tensor).__name__}, which wraps another tensor; pass "
            f"the wrapped tensor (for a DTensor, tensor.to_local())"
        )
    inner: Tensor = wait()
    return inner


def readable(tensor: Tensor, any_device: bool = False) -> Tensor:
    """Return the tensor if it is dense, else a dense copy."""
    if is_dense(tensor, any_device):
        return tensor
    values = tensor.resolve_conj().resolve_neg()
    if any_device or values.device.type in reachable:
        return values.contiguous()
    return writable(tensor).copy_(values)


def writable(tensor: Tensor, any_device: bool = False) -> Tensor:
    """Return `tensor` if it is dense, else an uninitialized dense buffer of the same shape.

    After an operation has filled the buffer, `copy_back` copies the values from the buffer to `tensor`.
    """
    if is_dense(tensor, any_device):
        return tensor
    if any_device or tensor.device.type in reachable:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")


def copy_back(tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """Copy each buffer returned by `writable` to the tensor for which the buffer was created."""
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer is not tensor:
            tensor.copy_(buffer)


def separate_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `tensors`, but replace each tensor that overlaps an earlier tensor in memory with a copy."""
    taken: list[tuple[int, int]] = []
    separate = []
    for tensor in tensors:
        if tensor.layout is not torch.strided or not tensor.numel():
            separate.append(tensor)
            continue
        start = tensor.data_ptr()
        last = sum(
            stride * (length - 1) for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
        )
        end = start + (last + 1) * tensor.element_size()
        shares = any(start < other_end and other_start < end for other_start, other_end in taken)
        separate.append(tensor.detach().clone() if shares else tensor)
        taken.append((start, end))
    return separate


def overlaps(start: int, length: int, other: int, other_length: int) -> bool:
    """Return whether two ranges of memory, given as addresses and sizes in bytes, have a byte in common."""
    return -length < start - other < other_length


def parts_of(tensors: Sequence[Tensor], number: int) -> list[tuple[int, int]]:
    """Return the address and the size in bytes of each tensor.

    If there is only one tensor, return the address and the size of each of its `number` equal parts.
    """
    if len(tensors) > 1 or number == 1:
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    start, length = tensors[0].data_ptr(), tensors[0].nbytes // number
    return [(start + part * length, length) for part in range(number)]


def span_of(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the smallest range of memory, as an address and a size in bytes, that contains all the parts."""
    start = min(address for address, _ in parts)
    return start, max(address + length for address, length in parts) - start


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor viewed as pairs of real numbers, and other tensors unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a dense tensor viewed as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def pointers_to(tensors: Sequence[Tensor]) -> Any:
    """Return a C array with the addresses of dense tensors."""
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def counts_of(tensors: Sequence[Tensor]) -> Any:
    """Return a C array with the element counts of tensors."""
    return (ctypes.c_size_t * len(tensors))(*[tensor.numel() for tensor in tensors])
