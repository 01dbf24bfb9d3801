"""Memory for whole gradients, of which only a few exist at a time (`zero` 2 and 3).

Buckets of several parameters are filled one gradient after the other, and use two buffers in turn: one is filled while the other is
reduced.  A bucket of a single parameter has all of its gradient at once.  It uses another two buffers, or, where autograd's memory can
be reduced as it is (*zero-copy*), none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator
from farandole.memory.tracker import memory_tag

if TYPE_CHECKING:
    from farandole.parallel.bucket import Bucket

DEPTH = 2
"""Buffers of a pool, and gradients of autograd's that wait for their reduction."""


def buffer_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the lengths of the buffers that buckets of these `lengths` use in turn: each as long as its longest bucket."""
    return [max(lengths[turn::DEPTH]) for turn in range(min(DEPTH, len(lengths)))]


class BufferPool:
    """Buffers of gradients for buckets that are filled in order.

    Bucket number n of the pool uses buffer n % DEPTH, on every rank: buffers are in memory that ranks share, so that nothing is copied
    for a reduction.  A bucket whose buffer is in use gets ordinary memory.

    Args:
        comm: the ranks that reduce the buckets; None for one rank.
        lengths: in elements, of each bucket.
        zero_copy: whether buckets are reduced in autograd's memory; the pool then counts them, and has no buffers.
    """

    def __init__(
        self,
        comm: Communicator | None,
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        zero_copy: bool,
    ) -> None:
        self.zero_copy = zero_copy
        self._lengths, self._dtype, self._device = list(lengths), dtype, device
        with memory_tag("gradients"):
            self._buffers = [
                empty(comm, length, dtype, device) for length in buffer_lengths([] if zero_copy else lengths)
            ]
        self._users: list[Bucket | None] = [None] * len(self._buffers)
        self._zero_copies: list[Bucket] = []

    @property
    def nbytes(self) -> int:
        """The size of all buffers on this rank."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def in_the_way(self, number: int) -> list[Bucket]:
        """The buckets whose reductions end before bucket `number` gets memory, if they are under way."""
        if self.zero_copy:
            return self._zero_copies[: len(self._zero_copies) + 1 - DEPTH]
        user = self._users[number % DEPTH]
        return [] if user is None else [user]

    def count(self, bucket: Bucket) -> None:
        """Bucket `bucket` uses memory of autograd's."""
        self._zero_copies.append(bucket)

    def acquire(self, bucket: Bucket, number: int) -> Tensor:
        """Return a buffer for bucket `number`, as long as the bucket."""
        if self.zero_copy:
            self.count(bucket)
        elif self._users[number % DEPTH] is None:
            self._users[number % DEPTH] = bucket
            return self._buffers[number % DEPTH][: self._lengths[number]]
        with memory_tag("gradients"):
            return torch.empty(self._lengths[number], dtype=self._dtype, device=self._device)

    def release(self, bucket: Bucket, number: int) -> None:
        """Bucket `bucket` no longer uses its buffer."""
        if self.zero_copy:
            self._zero_copies.remove(bucket)
        elif self._users[number % DEPTH] is bucket:
            self._users[number % DEPTH] = None


def empty(comm: Communicator | None, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that the ranks of `comm` share where they can, uninitialized; a collective call."""
    if comm is None:
        return torch.empty(length, dtype=dtype, device=device)
    return comm.empty(length, dtype=dtype, device=device)
