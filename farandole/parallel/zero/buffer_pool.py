"""Limit the memory of unsharded gradients (`zero` 2 and 3)."""

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
"""The number of buffers in a pool: one bucket is filled while another is reduced."""

_UNREDUCED = 2 * DEPTH
"""The maximum number of buckets in a pool that wait for the start of their reductions.

If more buckets wait, the oldest one is reduced although it is incomplete.
"""


def buffer_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the lengths of a pool's buffers for buckets with the given `lengths`."""
    return [max(lengths[turn::DEPTH]) for turn in range(min(DEPTH, len(lengths)))]


class BufferPool:
    """Double-buffered memory for unsharded gradients (`zero` 2 and 3).

    Buckets of several parameters alternate between two buffers: one is filled while the other is reduced.  Buckets
    with a single parameter use two other buffers, or no buffer if autograd's memory can be reduced directly
    (*zero-copy*).

    The buffers are in shared memory, so that reductions need no copies.  Therefore bucket n uses buffer n % DEPTH on
    every rank.  If that buffer is in use, the bucket uses normal memory.

    The pool limits the number of buckets that hold memory, in its buffers or elsewhere.  Before a bucket gets memory,
    it waits until at most DEPTH - 1 reductions are in progress.  If too many buckets wait for the start of their
    reductions because an earlier bucket is incomplete, reductions start early (`GradientReducer`).

    Args:
        comm: the communicator of the ranks that reduce the buckets; None for one rank.
        lengths: the length of each bucket in elements.
        zero_copy: whether buckets are reduced in autograd's memory; the pool then has no buffers.
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
        self._holders: list[Bucket] = []  # buckets that hold memory, the oldest first

    @property
    def nbytes(self) -> int:
        """The size of all buffers on this rank in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def in_the_way(self, number: int) -> list[Bucket]:
        """Return the buckets whose reductions must end before bucket `number` gets memory."""
        reduced = [bucket for bucket in self._holders if bucket.in_flight]
        found = reduced[: len(reduced) + 1 - DEPTH]
        user = None if self.zero_copy else self._users[number % DEPTH]
        return [*found, user] if user is not None and user.in_flight and user not in found else found

    def first_to_launch(self) -> Bucket | None:
        """Return the oldest waiting bucket if too many buckets wait for their reductions, else None."""
        waiting = [bucket for bucket in self._holders if not bucket.was_reduced]
        complete = sum(bucket.ready for bucket in waiting)
        return waiting[0] if complete >= DEPTH or len(waiting) > _UNREDUCED else None

    def hold(self, bucket: Bucket) -> None:
        """Record that a bucket holds memory."""
        self._holders.append(bucket)

    def acquire(self, bucket: Bucket, number: int) -> Tensor:
        """Return memory with the length of bucket `number`, and record that the bucket holds memory."""
        self.hold(bucket)
        if not self.zero_copy and self._users[number % DEPTH] is None:
            self._users[number % DEPTH] = bucket
            return self._buffers[number % DEPTH][: self._lengths[number]]
        with memory_tag("gradients"):
            return torch.empty(self._lengths[number], dtype=self._dtype, device=self._device)

    def release(self, bucket: Bucket, number: int) -> None:
        """Record that a bucket has released its memory."""
        self._holders.remove(bucket)
        if not self.zero_copy and self._users[number % DEPTH] is bucket:
            self._users[number % DEPTH] = None


def empty(comm: Communicator | None, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor, in shared memory if possible.  This is a collective call."""
    if comm is None:
        return torch.empty(length, dtype=dtype, device=device)
    return comm.empty(length, dtype=dtype, device=device)
