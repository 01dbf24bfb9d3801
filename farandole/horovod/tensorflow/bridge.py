"""Conversion between tensors of TensorFlow and of torch, which share memory where TensorFlow's alignment allows it.

Eager tensors are converted through DLPack.  Within a `tf.function` TensorFlow passes numpy arrays that are views of its
tensors, and copies a returned array only if its memory is not aligned.  No operation writes to its input: the result
of an operation is a new tensor.  Unsigned types that torch does not compute with are converted to the signed types of
the same width, bit by bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import torch

Array = np.ndarray[Any, np.dtype[Any]]

SUPPORTED = (
    tf.uint8,
    tf.uint16,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.bool,
)
"""The types that can be communicated."""

_ALIGNMENT = 64
"""TensorFlow aborts the process if the memory of a DLPack tensor is not a multiple of this many bytes."""

_AS_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_BFLOAT16 = tf.bfloat16.as_numpy_dtype  # a type that numpy has from an extension, and torch does not take


def check_type(dtype: tf.DType, name: str | None) -> None:
    """ValueError where tensors of a type cannot be communicated."""
    if dtype not in SUPPORTED:
        given = "" if name is None else f" {name}"
        raise ValueError(
            f"Tensor{given} of type {dtype.name} is not supported: {', '.join(one.name for one in SUPPORTED)} are; "
            f"hvd.broadcast_object and hvd.allgather_object send anything else"
        )


def from_eager(tensor: tf.Tensor) -> torch.Tensor:
    """A torch tensor in the memory of an eager tensor; one on another device is copied to the host."""
    if "CPU" not in tensor.device:
        with tf.device("/cpu:0"):
            tensor = tf.identity(tensor)
    return _as_signed(torch.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor)))


def to_eager(tensor: torch.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return an eager tensor of a type: that of the torch tensor, or the unsigned type of the same width."""
    # a tensor without elements has no memory to share
    if not tensor.numel():
        return tf.zeros(tuple(tensor.shape), dtype)
    whole = tensor.contiguous()
    if whole.data_ptr() % _ALIGNMENT:  # rows of a larger tensor
        whole = whole.clone()
    made = tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(whole))
    return made if made.dtype == dtype else tf.bitcast(made, dtype)


def from_numpy(array: Any) -> torch.Tensor:
    """A torch tensor in the memory of an array that TensorFlow has handed out (a scalar is copied)."""
    array = np.asarray(array)
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return _as_signed(torch.from_numpy(array))


def to_numpy(tensor: torch.Tensor, dtype: tf.DType) -> Array:
    """Return an array of a type: that of the torch tensor, or the unsigned type of the same width."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    array: Array = tensor.contiguous().numpy()
    return array if array.dtype == dtype.as_numpy_dtype else array.view(dtype.as_numpy_dtype)


def _as_signed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_AS_SIGNED[tensor.dtype]) if tensor.dtype in _AS_SIGNED else tensor
