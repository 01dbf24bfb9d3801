"""Helpers for the tests of the Horovod API; every rank can compute the inputs of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import farandole.horovod.torch as hvd

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextmanager
def session(**arguments: Any) -> Iterator[None]:
    """Call `hvd.init()` before a `with` block, and `hvd.shutdown()` after the block."""
    hvd.init(**arguments)
    try:
        yield
    finally:
        hvd.shutdown()


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return the input of one rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def all_given(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return the inputs of all ranks, stacked."""
    return torch.stack([given(rank, shape, dtype, seed) for rank in range(size)])


def close(result: Tensor, expected: Tensor) -> None:
    """Assert that two tensors have the same shape and data type, and are equal up to rounding."""
    assert result.dtype == expected.dtype
    loose = {torch.float16: 4e-3, torch.bfloat16: 4e-2}.get(result.dtype, 1e-5)
    torch.testing.assert_close(result, expected, rtol=loose, atol=loose)


def message(call: Callable[[], Any], kind: type[BaseException]) -> str:
    """Return the message of the exception that a call must raise."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)
