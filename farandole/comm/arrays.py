"""Convert NumPy arrays to tensors that share the memory of the arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farandole.comm.dense import plain

Array = Tensor | np.ndarray[Any, Any]
"""A tensor or a NumPy array; arrays are read and written in place."""


def read(value: Array) -> Tensor:
    """Return a tensor with the values of the input `value`.

    The tensor shares the memory of `value`, unless `value` is a read-only array, which is copied.

    Raises:
        TypeError: if `value` is neither a tensor nor an array, or is a tensor without memory, such as a fake tensor.
    """
    if isinstance(value, Tensor):
        return plain(value)
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"expected a tensor or a NumPy array, got {type(value).__name__}; convert it with torch.as_tensor"
        )
    return torch.from_numpy(value if value.flags.writeable else value.copy())


def written(value: Array) -> Tensor:
    """Return a tensor that shares the memory of the output `value`.

    Raises:
        ValueError: if `value` is a read-only array.
        TypeError: as in `read`.
    """
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ValueError("expected a writable output array, got a read-only array; pass a writable array")
    return read(value)


def read_list(values: Array | Sequence[Array]) -> list[Tensor]:
    """Convert one input or a list of inputs to a list of tensors with `read`."""
    return [read(each) for each in values] if isinstance(values, (list, tuple)) else [read(values)]  # type: ignore[arg-type]


def written_list(values: Array | Sequence[Array]) -> list[Tensor]:
    """Convert one output or a list of outputs to a list of tensors with `written`."""
    return [written(each) for each in values] if isinstance(values, (list, tuple)) else [written(values)]  # type: ignore[arg-type]
