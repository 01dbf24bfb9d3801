"""Tensors as the core sees them: addresses and counts.  Others are copied to such ones, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the bytes at `data_ptr` are the values in order, with no lazy sign or conjugation."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def plain(tensor: Tensor) -> Tensor:
    """The tensor that holds the memory: itself, or what a result of a functional collective stands for."""
    if type(tensor) is Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return tensor
    if not tensor.numel() or tensor.data_ptr():
        return tensor
    wait = getattr(tensor, "trigger_wait", None)  # AsyncCollectiveTensor
    if wait is None:
        raise TypeError(
            f"a {type(tensor).__name__} has no memory of its own to communicate; pass the tensor that it "
            f"wraps, for a DTensor its to_local()"
        )
    inner: Tensor = wait()
    return inner


def readable(tensor: Tensor) -> Tensor:
    """A dense tensor of the same values; the tensor itself where it is one."""
    return tensor if is_dense(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def writable(tensor: Tensor) -> Tensor:
    """A dense tensor of the same shape, to be copied back; the tensor itself where it is one."""
    return tensor if is_dense(tensor) else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def copy_back(tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """Put the values of buffers made by `writable` where they belong."""
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer is not tensor:
            tensor.copy_(buffer)


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def pointers_to(tensors: Sequence[Tensor]) -> Any:
    """A C array of the addresses of dense tensors."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def counts_of(tensors: Sequence[Tensor]) -> Any:
    """A C array of their numbers of elements."""
    return (ctypes.c_size_t * len(tensors))(*(tensor.numel() for tensor in tensors))
