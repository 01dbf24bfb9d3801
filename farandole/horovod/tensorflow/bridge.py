"""Tensors of TensorFlow as torch tensors and back, without copies: both see the same memory.

Eager tensors cross by DLPack; within a `tf.function` TensorFlow hands out numpy arrays that are views of its
tensors, and takes over arrays whose memory is aligned, which torch's is.  Neither side writes to what it was lent:
an operation's result is always a tensor of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import torch

Array = np.ndarray[Any, np.dtype[Any]]

SUPPORTED = (
    tf.uint8,
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
    return torch.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def to_eager(tensor: torch.Tensor) -> tf.Tensor:
    """An eager tensor in the memory of a torch tensor."""
    # a tensor of no elements has no memory to share
    if not tensor.numel():
        return tf.zeros(tuple(tensor.shape), tf.as_dtype(str(tensor.dtype).removeprefix("torch.")))
    return tf.experimental.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor.contiguous()))


def from_numpy(array: Any) -> torch.Tensor:
    """A torch tensor in the memory of an array that TensorFlow has handed out (a scalar is copied)."""
    array = np.asarray(array)
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> Array:
    """An array in the memory of a torch tensor."""
    if tensor.dtype == torch.bfloat16:
        whole: Array = tensor.contiguous().view(torch.int16).numpy().view(_BFLOAT16)
        return whole
    return tensor.contiguous().numpy()
