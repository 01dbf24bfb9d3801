"""The C codecs agree with torch, and give the same bits at every vector level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from farandole import native
from farandole.comm.compression.codecs import Codec
from farandole.native import VectorLevel

CODECS = [Codec(torch.bfloat16, 16), Codec(torch.float16, 16), Codec(torch.int8, 256), Codec(torch.int8, 50)]
SIZES = [1, 15, 256, 257, 5000]


def by_torch(codec: Codec, y: Tensor) -> Tensor:
    """Return the values that the receiver of `y` decodes, computed by torch."""
    if codec.dtype is not torch.int8:
        return y.to(codec.dtype).float()
    decoded = []
    for block in y.split(codec.block):
        scale = block.abs().amax() / 127
        units = 127 / block.abs().amax()
        decoded.append((block * units).round() * scale if scale > 0 else block * 0)
    return torch.cat(decoded)


@pytest.fixture(params=list(VectorLevel), ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Iterator[VectorLevel]:
    """Use each vector level of this processor."""
    if request.param > native.vector_level():
        pytest.skip(f"this processor has no {request.param.name}")
    native.library().frd_use_vector_level(request.param)
    yield request.param
    native.library().frd_use_vector_level(VectorLevel.AVX512)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_encoding_equals_torch(codec: Codec, size: int, level: VectorLevel) -> None:
    torch.manual_seed(size)
    x, residual = torch.randn(size + 1)[1:] * 3, torch.randn(size)  # at an odd address
    y = x * 0.3 + residual
    expected = by_torch(codec, y)
    kept, decoded = residual.clone(), torch.empty(size)
    message = codec.encode(x, 0.3, kept, decoded)
    assert torch.equal(decoded, expected)
    assert torch.equal(kept, y - expected)
    summed = x.clone()
    codec.decode(message, summed, 2.0)
    assert torch.equal(summed, x * 2 + expected)
    codec.decode(message, summed.fill_(torch.nan))
    assert torch.equal(summed, expected)
    assert torch.equal(codec.encode(x, 0.3, None), codec.encode(x * 0.3, 1.0, None))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_infinities_and_nan_are_decoded_as_such(codec: Codec, bad: float, level: VectorLevel) -> None:
    x, residual, decoded = torch.ones(600), torch.full((600,), 0.25), torch.empty(600)
    x[300] = bad
    message = codec.encode(x, 1.0, residual, decoded)
    assert not decoded[300].isfinite()
    assert residual.isfinite().all()
    assert residual[300] == 0.25  # unchanged
    out = torch.zeros(600)
    codec.decode(message, out)
    assert torch.equal(out.isfinite(), decoded.isfinite())
    assert out[:200].isfinite().all()  # other blocks are not affected
    assert out[550:].isfinite().all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-37, 3e-36, 1e-20, 1e30, 1.4e38])
def test_int8_of_very_small_and_large_values(value: float, level: VectorLevel) -> None:
    codec, decoded = CODECS[2], torch.empty(300)
    x = torch.full((300,), value) * torch.where(torch.arange(300) % 2 > 0, -1.0, 1.0)
    residual = torch.zeros(300)
    codec.encode(x, 1.0, residual, decoded)
    assert decoded.isfinite().all()
    assert torch.equal(decoded + residual, x)
    assert value < 1e-35 or torch.allclose(decoded, x, rtol=1e-6, atol=0)


def test_int8_of_blocks_without_a_scale() -> None:
    decoded = torch.empty(10)
    CODECS[2].encode(torch.full((10,), 3e38), 1.0, torch.zeros(10), decoded)
    assert decoded.isnan().all()


@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (40, 7, 3), (1000, 33, 4)])
def test_orthonormalization_and_outer_products(rows: int, columns: int, rank: int) -> None:
    torch.manual_seed(rows)
    core = native.library()
    p, q = torch.randn(rank, rows), torch.randn(rank, columns)
    before = p.clone()
    core.frd_orthonormalize(p.data_ptr(), rows, rank)
    assert torch.allclose(p @ p.T, torch.eye(rank), atol=1e-5)
    assert torch.allclose(p.T @ (p @ before.T), before.T, atol=1e-3)  # both span the same space
    x = torch.empty(rows, columns)
    core.frd_outer(x.data_ptr(), p.data_ptr(), q.data_ptr(), rows, columns, rank)
    assert torch.allclose(x, p.T @ q, atol=1e-5)


def test_columns_that_depend_on_others_become_zero() -> None:
    torch.manual_seed(0)
    p = torch.randn(3, 50)
    p[1] = 2 * p[0]
    native.library().frd_orthonormalize(p.data_ptr(), 50, 3)
    assert torch.equal(p[1], torch.zeros(50))
    assert torch.allclose(p[[0, 2]] @ p[[0, 2]].T, torch.eye(2), atol=1e-5)
    p[0, 3] = torch.nan
    native.library().frd_orthonormalize(p.data_ptr(), 50, 3)
    assert p[0].isnan().all()
