"""Normalization, gated activation and rotation of the C core, compared with torch in fp64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from farandole import native
from farandole.models.layers import gated, rms_norm
from farandole.models.rotary import Rotary, rotate
from farandole.native import VectorLevel
from farandole.serve import elements
from farandole.serve.rows import IndependentRows

LEVELS = [
    level for level in VectorLevel if native.available() and level <= native.library().frd_vector_level()
]


def rotation(x: Tensor) -> tuple[Any, ...]:
    table = Rotary(x.shape[-1]).table(torch.arange(3, 3 + x.shape[2])[None], x.dtype)
    return (x, *table, False)


CASES: dict[
    str, tuple[Callable[..., Tensor], Callable[..., Tensor | None], Callable[[int], tuple[Any, ...]]]
] = {
    "rms_norm": (
        rms_norm,
        elements.rms_norm,
        lambda width: (torch.randn(1, 5, width), torch.randn(width), 1e-5),
    ),
    "gated": (gated, elements.gated, lambda width: (20 * torch.randn(1, 5, 2 * width), "silu")),
    "rotate": (
        rotate,
        elements.rotate,
        lambda width: rotation(torch.randn(1, 5, 4 * 2 * width).view(1, 5, 4, -1).transpose(1, 2)),
    ),
}


def converted(arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(each.to(dtype) if isinstance(each, Tensor) else each for each in arguments)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 16, 23, 64])
@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str, width: int, dtype: torch.dtype, level: VectorLevel) -> None:
    torch.manual_seed(width)
    function, kernel, arguments_of = CASES[name]
    arguments = converted(arguments_of(width), dtype)
    expected = function(*converted(arguments, torch.float64))
    native.library().frd_use_vector_level(level)
    try:
        found = kernel(*arguments)
    finally:
        native.library().frd_use_vector_level(VectorLevel.AVX512)
    assert found is not None and found.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_other_types_use_torch(name: str) -> None:
    function, kernel, arguments_of = CASES[name]
    arguments = converted(arguments_of(16), torch.float64)
    assert kernel(*arguments) is None
    with torch.inference_mode(), IndependentRows():
        assert torch.equal(function(*arguments), inspect.unwrap(function)(*arguments))


def test_a_value_that_is_not_a_number_stays_one() -> None:
    x = torch.tensor([[float("nan")] + [1.0] * 31], dtype=torch.bfloat16)
    found = elements.gated(x, "silu")
    assert found is not None and bool(found[0, 0].isnan()) and not bool(found[0, 1:].isnan().any())
