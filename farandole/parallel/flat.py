"""Several tensors in one flat buffer, and the equal shards of the buffer that ranks own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

ALIGNMENT = 16
"""Elements.  Every tensor starts on a cache line, so that kernels treat it like a tensor of its own."""


@dataclass(frozen=True)
class FlatRange:
    """The part of a tensor that lies in a shard: `length` consecutive elements of the flattened tensor.

    They begin at element `start` of tensor number `index`, and at element `offset` of the shard.
    """

    index: int
    start: int
    offset: int
    length: int


class FlatLayout:
    """The places of tensors of `shapes` in a buffer of `length` elements, which is cut into `shards` of equal length.

    A shard may end within a tensor.  Elements between tensors and after the last one belong to no tensor.  With `strides`, of tensors
    without gaps, elements lie in the order of their memory; with several shards tensors are contiguous.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        shards: int = 1,
        strides: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self._strides = strides
        self.counts = [math.prod(shape) for shape in self.shapes]
        self.starts: list[int] = []
        end = 0
        for count in self.counts:
            self.starts.append(end)
            end += -(-count // ALIGNMENT) * ALIGNMENT
        self.shard_length = -(-end // (shards * ALIGNMENT)) * ALIGNMENT
        self.length = self.shard_length * shards

    @property
    def has_gaps(self) -> bool:
        """Whether there are elements that belong to no tensor."""
        return self.length != sum(self.counts)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors, as parts of a buffer."""
        if self._strides is not None:
            offset = int(buffer.storage_offset())
            return [
                buffer.as_strided(shape, stride, offset + start)
                for start, shape, stride in zip(self.starts, self.shapes, self._strides, strict=True)
            ]
        return [
            buffer[start : start + count].view(shape)
            for start, count, shape in zip(self.starts, self.counts, self.shapes, strict=True)
        ]

    def zero_gaps(self, buffer: Tensor) -> None:
        """Set the elements of a buffer that belong to no tensor to zero.  The memory of the tensors is not touched."""
        ends = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        for end, start in zip([0, *ends], [*self.starts, self.length], strict=True):
            if end < start:
                buffer[end:start].zero_()

    def shard(self, buffer: Tensor, number: int) -> Tensor:
        """Shard `number` of a buffer."""
        return buffer[number * self.shard_length : (number + 1) * self.shard_length]

    def ranges(self, number: int) -> list[FlatRange]:
        """The parts of tensors in shard `number`, in order; empty tensors have none."""
        low, high = number * self.shard_length, (number + 1) * self.shard_length
        found = []
        for index, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            first, last = max(start, low), min(start + count, high)
            if first < last:
                found.append(FlatRange(index, first - start, first - low, last - first))
        return found
