"""Conversion of NumPy arrays to tensors in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Tensor | np.ndarray[Any, Any]
"""A tensor, or a NumPy array that is used in place."""


def read(value: Array) -> Tensor:
    """Return a tensor that shares memory with an array; a read-only array is copied."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"expected a tensor or a NumPy array, got {type(value).__name__}; try torch.as_tensor"
        )
    return torch.from_numpy(value if value.flags.writeable else value.copy())


def written(value: Array) -> Tensor:
    """Return a tensor that shares memory with an array for results."""
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ValueError("expected a writable array for results, got a read-only one; pass a copy")
    return read(value)


def read_list(values: Array | Sequence[Array]) -> list[Tensor]:
    """Return the tensors of one array or of a list of arrays."""
    return [read(each) for each in values] if isinstance(values, (list, tuple)) else [read(values)]  # type: ignore[arg-type]


def written_list(values: Array | Sequence[Array]) -> list[Tensor]:
    """Return the tensors of one array or of a list of arrays, for results."""
    return [written(each) for each in values] if isinstance(values, (list, tuple)) else [written(values)]  # type: ignore[arg-type]
