"""Compute fp32 matrix products on the CPU with the library that is faster on this processor.

On x86, torch computes fp32 products with MKL, which uses 256-bit instructions on AMD processors.  Zen 5 executes
512-bit instructions at full width.  oneDNN, which is also part of torch, uses these instructions and takes half the
time: one core of a Zen 5 EPYC multiplies 256 x 768 and 768 x 2304 matrices at 98 GFLOP/s with MKL, and at 209 GFLOP/s
with oneDNN.

`use_fast_products` replaces the CPU kernels of `aten::mm`, `aten::addmm` and `aten::addmm_` for the whole process.
Autograd and dispatch modes still see these operators.  Code from torch.compile calls `aten::mm.out`, which is not
replaced.  Within the context `torch.backends.mkldnn.flags(enabled=False)`, torch's kernels are used.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from farandole.parallel.processor import Processor, read_processor

_SMALL = 1 << 22
"""The number of scalar multiplications in a product below which the libraries are equally fast."""

_LARGE_BYTES = 4 << 20
"""The size of a matrix in bytes above which a product is computed in blocks of rows, to limit temporary memory."""

_BLOCK_BYTES = 1 << 20
"""The size in bytes of a block of rows.  A block must stay in the cache until it has been copied to the result."""


def multiplies_faster_with_onednn(processor: Processor) -> bool:
    """Return whether oneDNN computes fp32 products faster than MKL: on AMD processors since Zen 5 (family 26)."""
    return processor.vendor == "AuthenticAMD" and processor.family >= 26 and "avx512f" in processor.flags


@cache
def use_fast_products() -> bool:
    """Compute large fp32 products with oneDNN if oneDNN is faster on this processor; return whether oneDNN is used."""
    if not torch.backends.mkldnn.is_available() or not multiplies_faster_with_onednn(read_processor()):
        return False
    replace_kernels()
    return True


@cache
def replace_kernels() -> Library:
    """Compute large fp32 products with oneDNN, on any processor."""
    library = Library("aten", "IMPL")
    onednn = torch.ops.mkldnn._linear_pointwise.default  # x w^T + bias, as used by torch.compile
    mm, addmm, addmm_ = (get_kernel(f"aten::{name}", "CPU") for name in ("mm", "addmm", "addmm_"))

    def product(keys: Any, a: Tensor, b: Tensor) -> Tensor:
        if not _is_fast(a, b):
            return mm.call_boxed(keys, a, b)
        if a.stride(1) == 1 or a.nbytes <= _LARGE_BYTES:
            return onednn(a, b.t(), None, "none", [], "")
        result = a.new_empty(a.shape[0], b.shape[1])  # oneDNN copies a transposed matrix
        rows = _rows_of_block(a, b)
        for part, own in zip(result.split(rows), a.split(rows), strict=True):
            part.copy_(onednn(own, b.t(), None, "none", [], ""))
        return result

    def product_and_bias(
        keys: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        if beta == alpha == 1 and bias.shape == b.shape[1:] and bias.dtype == a.dtype and _is_fast(a, b):
            return onednn(a, b.t(), bias.contiguous(), "none", [], "")
        return addmm.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)

    def add_product(
        keys: Any, total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        if beta != 1 or alpha != 1 or total.dtype != a.dtype or not _is_fast(a, b):
            return addmm_.call_boxed(keys, total, a, b, beta=beta, alpha=alpha)
        small = max(a.nbytes, total.nbytes) <= _LARGE_BYTES
        rows = a.shape[0] if small else _rows_of_block(a, b)
        for part, own in zip(total.split(rows), a.split(rows), strict=True):
            part.add_(onednn(own, b.t(), None, "none", [], ""))
        return total

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that these kernels exist already
        for name, kernel in (("mm", product), ("addmm", product_and_bias), ("addmm_", add_product)):
            library.impl(name, kernel, "CPU", with_keyset=True)
    return library


def _is_fast(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN supports the product of these matrices and computes it faster than MKL."""
    return (
        a.dtype == b.dtype == torch.float32
        and a.shape[0] * b.numel() >= _SMALL
        and a.shape[1:] == b.shape[:1]
        and _is_dense(a)
        and _is_dense(b)
        and bool(torch.backends.mkldnn.enabled)
    )


def _rows_of_block(a: Tensor, b: Tensor) -> int:
    """Return the number of rows of `a` per block.  The block of the product has the same number of rows."""
    return max(1, _BLOCK_BYTES // (max(a.shape[1], b.shape[1]) * a.itemsize))


def _is_dense(matrix: Tensor) -> bool:
    """Return whether the rows or the columns of a matrix are contiguous and do not overlap."""
    (rows, columns), (row, column) = matrix.shape, matrix.stride()
    return (column == 1 and row >= columns) or (row == 1 and column >= rows)
