"""The vector levels of the reductions give the same bits as the plain code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from farandole import native
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.native import VectorLevel
from tests.comm.test_collectives import FLOATS, INTEGERS, check_all_reduce, check_special_floats
from tests.native.processor import vector_level
from tests.pool import Ranks


def check_at_level(rank: int, size: int, level: int) -> None:
    core = native.library()
    in_use = core.frd_use_vector_level(level)
    try:
        for dtype in [*FLOATS, *INTEGERS]:
            for seed, op in enumerate(["sum", "avg", "product", "min", "max"]):
                check_all_reduce(rank, size, seed, 70_001, dtype, op, shared=False)
                if dtype in FLOATS:
                    check_special_floats(rank, size, dtype, op)
    finally:
        core.frd_use_vector_level(VectorLevel.AVX512)
    assert in_use == level


def test_the_core_uses_the_extensions_of_this_processor() -> None:
    assert native.vector_level() == vector_level()


@pytest.mark.parametrize("level", list(VectorLevel))
@pytest.mark.parametrize("size", [2, 3])
def test_every_vector_level_equals_plain_code(
    ranks: Callable[[int], Ranks], size: int, level: VectorLevel
) -> None:
    if level > native.vector_level():
        pytest.skip(f"this processor has no {level.name}")
    ranks(size).run(check_at_level, int(level))


def every_half(rank: int, size: int, dtype: torch.dtype) -> None:
    """Add zero to all 65,536 bit patterns of a 16-bit float: the conversion to fp32 and back changes no value."""
    core = native.library()
    patterns = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    for level in range(native.vector_level() + 1):
        core.frd_use_vector_level(level)
        tensor = patterns.clone() if rank == 0 else torch.zeros_like(patterns)
        torch.distributed.all_reduce(tensor)
        torch.testing.assert_close(tensor, patterns, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_float_survives_a_round_trip(ranks: Callable[[int], Ranks], dtype: torch.dtype) -> None:
    ranks(2).run(every_half, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("level", list(VectorLevel))
def test_sums_of_random_bits_round_as_in_torch(dtype: torch.dtype, op: str, level: VectorLevel) -> None:
    """Include subnormal numbers, infinities and NaN, and lengths that leave a remainder after the last vector."""
    if level > native.vector_level():
        pytest.skip(f"this processor has no {level.name}")
    core, generator = native.library(), torch.Generator().manual_seed(level)
    core.frd_use_vector_level(level)
    try:
        for count in [1, 31, 32, 1_023, 300_001]:
            bits = torch.randint(-(1 << 15), 1 << 15, (2, count), generator=generator, dtype=torch.int16)
            bits[:, : count // 3] &= 0x00FF  # many subnormal numbers
            a, b = bits.view(dtype)
            total = a.float() + b.float()
            expected = (total / 2 if op == "avg" else total).to(dtype)
            result = torch.empty_like(a)
            arguments = result.data_ptr(), a.data_ptr(), b.data_ptr(), count, TYPES[dtype]
            core.frd_combine(*arguments, REDUCTION_NAMES.index(op))
            finite = ~expected.isnan()
            assert torch.equal(result.isnan(), ~finite)
            assert torch.equal(result.view(torch.int16)[finite], expected.view(torch.int16)[finite])
    finally:
        core.frd_use_vector_level(VectorLevel.AVX512)
