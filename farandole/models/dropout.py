"""Dropout for a shard of a tensor, with the random numbers that one process would draw for the complete tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ShardedDropout:
    """Dropout for a shard that begins at index `first` of dimension `dim`, which has `total` elements in the complete tensor.

    All processes draw the mask of the complete tensor from equal generators, and apply their part of the mask.
    """

    dim: int
    first: int
    total: int

    def __call__(self, x: Tensor, probability: float, training: bool = True) -> Tensor:
        """Return `x` with elements dropped, as `F.dropout` does."""
        if not training or not probability:
            return x
        shape = list(x.shape)
        shape[self.dim] = self.total
        mask = F.dropout(x.new_ones(shape), probability)
        return x * mask.narrow(self.dim, self.first, x.shape[self.dim])
