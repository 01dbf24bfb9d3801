"""Apply dropout to a tensor that is split over processes, with the mask that one process would draw.

The processes have random generators with equal states.  Each process draws the mask for the complete tensor, and uses
the part of the mask for its elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class OwnPositions:
    """The positions of `batch` sequences on this process, with their indices in complete sequences of `length`."""

    batch: int
    length: int
    index: Tensor


_own: ContextVar[OwnPositions | None] = ContextVar("own positions", default=None)


@contextmanager
def with_positions(own: OwnPositions) -> Iterator[None]:
    """Return a context in which the tensors passed to `dropout` contain only the positions in `own`."""
    before = _own.set(own)
    try:
        yield
    finally:
        _own.reset(before)


def dropout(x: Tensor, probability: float, training: bool = True) -> Tensor:
    """Return `x` with elements dropped, as `F.dropout` does.

    Within `with_positions`, `x` is (batch, own positions, ...) or (batch * own positions, width).
    """
    if not training or not probability or _own.get() is None:
        return F.dropout(x, probability, training)
    return x * _draw_mask(x, x.shape, probability)


def _draw_mask(like: Tensor, shape: Sequence[int], probability: float) -> Tensor:
    """Return a mask with the dtype of `like`, whose values are 0 or 1 / (1 - probability)."""
    own = _own.get()
    if own is None:
        return F.dropout(like.new_ones(shape), probability)
    rest = shape[2:] if len(shape) > 2 else shape[1:]
    mask = F.dropout(like.new_ones((own.batch, own.length, *rest)), probability)
    return mask[:, own.index].reshape(shape)


@dataclass(frozen=True)
class ShardedDropout:
    """Dropout for a shard that begins at index `first` of dimension `dim`, whose complete size is `total`."""

    dim: int
    first: int
    total: int

    def __call__(self, x: Tensor, probability: float, training: bool = True) -> Tensor:
        """Return `x` with elements dropped, as `F.dropout` does."""
        if not training or not probability:
            return x
        shape = list(x.shape)
        shape[self.dim] = self.total
        return x * _draw_mask(x, shape, probability).narrow(self.dim, self.first, x.shape[self.dim])
