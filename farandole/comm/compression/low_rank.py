"""PowerSGD compression, which approximates a gradient matrix by the product of two narrow matrices, the factors.

The factors are computed by one step of power iteration.  They are summed by an ordinary all-reduce over the hosts.

T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD: practical low-rank gradient compression for distributed optimization
(2019), arXiv:1905.13727.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from farandole import native
from farandole.comm.algorithms.steps import Reduce, Steps
from farandole.comm.compression.base import Compression, Compressor, Parameters, compensated, remember
from farandole.comm.transport import Transport

_WORTH_IT = 2
"""Matrices are compressed only if compression reduces the number of values by at least this factor."""


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Compresses n x m matrices to (n + m) * `rank` values; small matrices, vectors and scalars are not compressed.

    A parameter with more than two dimensions is treated as a matrix whose rows are indexed by the first dimension.  If
    the parameters in a flat tensor are unknown, each share of the tensor is treated as an approximately square matrix.

    Raises:
        ValueError: if `rank` is less than 1.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"PowerSGD: expected rank >= 1, got {self.rank}")

    def _compressor(self, count: int, parameters: Parameters, exact: int) -> Compressor:
        return PowerSGDCompressor(self, count, parameters, exact)


@dataclass(frozen=True)
class _Matrix:
    """A matrix that starts at element `start` of a flat tensor, and the rank of its factors."""

    start: int
    rows: int
    columns: int
    rank: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def worth_it(self) -> bool:
        return 0 < _WORTH_IT * self.rank * (self.rows + self.columns) <= self.rows * self.columns


class PowerSGDCompressor(Compressor):
    """A compressor that approximates the matrices in a flat tensor by low-rank factors.

    `state` contains the right factor (rank x columns) of each matrix, from which the next call of `reduce` starts.
    """

    def __init__(self, compression: PowerSGD, count: int, parameters: Parameters, exact: int) -> None:
        super().__init__(compression, count, parameters, exact)
        self._rank = compression.rank
        self._square = not parameters
        self._cuts = sorted({0, count - exact, *(first for first, _ in parameters)})
        found = (self._matrix(first, shape[0], math.prod(shape[1:])) for first, shape in parameters if shape)
        self._matrices = [matrix for matrix in found if matrix.worth_it]

    def _matrix(self, start: int, rows: int, columns: int) -> _Matrix:
        return _Matrix(start, rows, columns, min(self._rank, rows, columns))

    def windows(self, leaders: int, length: int) -> Iterator[list[int]]:
        """Split the tensor into windows of about `length` elements; shares end at parameter boundaries.

        For each window, yield the bounds of the shares, as in `Compressor.windows`.
        """
        if self._square:
            yield from super().windows(leaders, length)
            return
        starts = [0]
        for before, after in pairwise(self._cuts):
            if after - starts[-1] > length and before > starts[-1]:
                starts.append(before)
        for first, last in pairwise([*starts, self._cuts[-1]]):
            inside = [cut for cut in self._cuts if first <= cut <= last]
            ideal = [first + (last - first) * leader / leaders for leader in range(1, leaders)]
            yield [first, *(min(inside, key=lambda cut: abs(cut - at)) for at in ideal), last]

    def reduce(
        self, share: Tensor, transport: Transport, start: int, factor: float, exactly: Reduce
    ) -> Steps:
        """Approximate the sum of `share` times `factor` over the hosts with two all-reduces.

        For each matrix M, the right factor Q of the previous call is known.  The first all-reduce sums M Q over the
        hosts, and also sums all values outside the matrices.  The columns of the sum of M Q are orthonormalized, which
        gives the left factor P.  The second all-reduce sums M^T P, which gives the next right factor.
        """
        residual = self.residual(start, share)
        values = compensated(share, factor, residual)
        matrices = self._matrices_in(start, share.numel())
        local = [values[m.start - start : m.end - start].view(m.rows, m.columns) for m in matrices]
        left = [self._right_factor(m) @ matrix.T for m, matrix in zip(matrices, local, strict=True)]
        rest = _between(matrices, start, start + share.numel())
        packed = torch.cat(
            [*(p.reshape(-1) for p in left), *(values[a - start : b - start] for a, b in rest)]
        )
        yield from exactly(packed, transport)

        sizes = [m.rank * m.rows for m in matrices] + [b - a for a, b in rest]
        pieces = packed.split(sizes)
        left = [p.view(m.rank, m.rows) for p, m in zip(pieces, matrices, strict=False)]
        for piece, (a, b) in zip(pieces[len(matrices) :], rest, strict=True):
            share[a - start : b - start] = piece
        if not matrices:
            return
        core = native.library()
        for p, m in zip(left, matrices, strict=True):
            core.frd_orthonormalize(p.data_ptr(), m.rows, m.rank)
        packed = torch.cat([(p @ matrix).view(-1) for p, matrix in zip(left, local, strict=True)])
        yield from exactly(packed, transport)

        right = packed.split([m.rank * m.columns for m in matrices])
        for m, p, q, matrix in zip(matrices, left, right, local, strict=True):
            own = share[m.start - start : m.end - start]
            core.frd_outer(own.data_ptr(), p.data_ptr(), q.data_ptr(), m.rows, m.columns, m.rank)
            if q.isfinite().all():
                self.state[f"right.{m.start}"] = q.view(m.rank, m.columns).clone()
            if residual is not None:  # the hosts' residuals add up to the error of the sum
                missed = matrix.view(-1).sub_(own, alpha=1 / transport.size)
                remember(residual[m.start - start : m.end - start], missed)

    def sent_fraction(self, hosts: int) -> float:
        """Return the number of values sent, divided by the number of values in the tensor."""
        saved = sum(
            m.rows * m.columns - m.rank * (m.rows + m.columns) for m in self._matrices_in(0, self.count)
        )
        return 1 - saved / max(1, self.count)

    def _share_bytes(self, start: int, end: int) -> int:
        factors = sum(m.rank * m.columns for m in self._matrices_in(start, end - start))
        return super()._share_bytes(start, end) + factors * torch.float32.itemsize

    def _matrices_in(self, start: int, count: int) -> list[_Matrix]:
        if not self._square:
            return [m for m in self._matrices if start <= m.start < start + count]
        rows = max(1, math.isqrt(count))
        square = self._matrix(start, rows, count // rows)
        return [square] if square.worth_it else []

    def _right_factor(self, matrix: _Matrix) -> Tensor:
        """Return the previous right factor of `matrix`, with random rows in place of missing or zero rows."""
        q = self._stored(f"right.{matrix.start}", (matrix.rank, matrix.columns))
        if q is None or not q.any(1).all():
            # the seed makes the random values equal on all hosts
            chance = torch.rand(
                matrix.rank, matrix.columns, generator=torch.Generator().manual_seed(matrix.start)
            ).sub_(0.5)
            q = chance if q is None else torch.where(q.any(1, keepdim=True), q, chance)
        return q


def _between(matrices: list[_Matrix], start: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges (first, end) of elements from `start` to `end` that are outside all matrices."""
    starts, ends = [m.start for m in matrices], [m.end for m in matrices]
    return [(a, b) for a, b in zip([start, *ends], [*starts, end], strict=True) if a < b]
