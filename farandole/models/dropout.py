"""Apply dropout to a tensor that is split over processes, with the mask that a single process would draw.

All processes must have random generators in the same state.  Each process draws the mask for the complete tensor,
and applies only the mask of its own elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class OwnPositions:
    """This process's positions in each sequence of a batch.

    Args:
        batch: the number of sequences.
        length: the number of positions in a complete sequence.
        index: the indices of this process's positions in the complete sequence.
    """

    batch: int
    length: int
    index: Tensor


_own: ContextVar[OwnPositions | None] = ContextVar("own positions", default=None)


@contextmanager
def with_positions(own: OwnPositions) -> Iterator[None]:
    """Within the context, treat tensors passed to `dropout` as containing only the positions in `own`."""
    before = _own.set(own)
    try:
        yield
    finally:
        _own.reset(before)


def dropout(x: Tensor, probability: float, training: bool = True) -> Tensor:
    """Apply dropout to `x`, as `F.dropout` does.

    Within `with_positions`, `x` has the shape (batch, own positions, ...) or (batch * own positions, width).
    """
    if not training or not probability or _own.get() is None:
        return F.dropout(x, probability, training)
    return x * _draw_mask(x, x.shape, probability)


def _draw_mask(like: Tensor, shape: Sequence[int], probability: float) -> Tensor:
    """Return this process's part of a dropout mask; its values are 0 and 1 / (1 - probability)."""
    own = _own.get()
    if own is None:
        return F.dropout(like.new_ones(shape), probability)
    rest = shape[2:] if len(shape) > 2 else shape[1:]
    mask = F.dropout(like.new_ones((own.batch, own.length, *rest)), probability)
    return mask[:, own.index].reshape(shape)


@dataclass(frozen=True)
class ShardedDropout:
    """Dropout for a shard of a tensor.

    The shard contains the `ranges` (start, end) of indices in dimension `dim`.  The complete tensor has size `total`
    in this dimension.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    total: int

    def __call__(self, x: Tensor, probability: float, training: bool = True) -> Tensor:
        """Apply dropout to the shard `x`."""
        if not training or not probability:
            return x
        shape = list(x.shape)
        shape[self.dim] = self.total
        mask = _draw_mask(x, shape, probability)
        own = [mask.narrow(self.dim, start, end - start) for start, end in self.ranges]
        return x * (own[0] if len(own) == 1 else torch.cat(own, self.dim))


class DropoutWrapper:
    """Replaces the computation of an `nn.Dropout` with `function(x, probability, training)`."""

    def __init__(self, function: Callable[[Tensor, float, bool], Tensor]) -> None:
        self._function = function

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Apply dropout."""
        assert isinstance(module, nn.Dropout)
        (x,) = (*args, *kwargs.values())
        return self._function(x, module.p, module.training)
