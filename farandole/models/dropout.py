"""Dropout with the random numbers that one process would draw, if processes share the elements of a tensor.

The processes have equal generators.  Each draws the mask of the complete tensor and uses its part of the mask.
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
    """The positions `index` of each of `batch` sequences that this process has, if a complete sequence has `length`."""

    batch: int
    length: int
    index: Tensor


_own: ContextVar[OwnPositions | None] = ContextVar("own positions", default=None)


@contextmanager
def with_positions(own: OwnPositions) -> Iterator[None]:
    """Return a context in which `dropout` gets tensors of these positions."""
    before = _own.set(own)
    try:
        yield
    finally:
        _own.reset(before)


def dropout(x: Tensor, probability: float, training: bool = True) -> Tensor:
    """Return `x` with elements dropped, as `F.dropout` does.

    Within `with_positions`, `x` is (batch, own positions, ...) or (batch times own positions, width).
    """
    if not training or not probability or _own.get() is None:
        return F.dropout(x, probability, training)
    return x * _draw_mask(x, x.shape, probability)


def _draw_mask(like: Tensor, shape: Sequence[int], probability: float) -> Tensor:
    """Return a mask with the dtype of `like`, with zeros, and 1 / (1 - probability) elsewhere."""
    own = _own.get()
    if own is None:
        return F.dropout(like.new_ones(shape), probability)
    rest = shape[2:] if len(shape) > 2 else shape[1:]
    mask = F.dropout(like.new_ones((own.batch, own.length, *rest)), probability)
    return mask[:, own.index].reshape(shape)


@dataclass(frozen=True)
class ShardedDropout:
    """Dropout for the elements from `first` on in dimension `dim`, which has `total` elements in the complete tensor."""

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
