"""Rotary positions: a rotation under which products depend only on distance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farandole.models.rotary import Rotary
from farandole.models.sequence import SequenceInfo


def rotate(x: torch.Tensor) -> torch.Tensor:
    return Rotary(x.shape[-1])(x.reshape(-1, 1, *x.shape[-2:])).view_as(x)


def test_rotation_is_a_complex_product() -> None:
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    frequencies = 10_000.0 ** -(torch.arange(4) / 4).double()
    turns = torch.polar(torch.ones(7, 4).double(), torch.arange(7).double()[:, None] * frequencies)
    expected = torch.complex(x[..., :4], x[..., 4:]) * turns
    torch.testing.assert_close(rotate(x), torch.cat((expected.real, expected.imag), -1), atol=1e-6, rtol=1e-5)


def test_products_depend_only_on_distance() -> None:
    query, key = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    products = rotate(query.expand(20, 8)) @ rotate(key.expand(20, 8)).T
    for distance in range(-19, 20):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=1e-5)


def test_gradient_of_the_rotation() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotate, (x,))


LONGROPE: dict[str, Any] = {"scaling": "longrope", "short_factors": (1.0,) * 4, "long_factors": (2.0,) * 4}


@pytest.mark.parametrize("options", [{"scaling": "dynamic", "factor": 2.0}, LONGROPE])
def test_positions_without_values_count_from_0(options: dict[str, Any]) -> None:
    """In a dry run, the scaling depends on the number of positions."""
    rotary = Rotary(8, original=16, **options)
    assert rotary.depends_on_length
    x = torch.randn(1, 2, 20, 8)
    with FakeTensorMode() as mode:
        fake = rotary(mode.from_tensor(x))
        assert fake.shape == x.shape
        info = SequenceInfo(positions=mode.from_tensor(torch.arange(20)))
        assert rotary(mode.from_tensor(x), info).shape == x.shape


def test_invalid_rotary_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="expected an even rotary dimension, got width=7"):
        Rotary(7)
    with pytest.raises(ValueError, match="unknown scaling='longrop' .* expected one of linear, .*, longrope"):
        Rotary(8, scaling="longrop")
    with pytest.raises(ValueError, match="expected 4 short and 4 long factors for width=8, got 3 and 4"):
        Rotary(8, **LONGROPE | {"short_factors": (1.0,) * 3})
