"""Sample in a seeded random order without storing a permutation.

A run's position in its data is one number: the number of samples consumed by all ranks together.  With n
samples per epoch, sample k of a run is entry k mod n in the permutation of epoch k div n.  The permutation is a
four-round Feistel network on the smallest even number of bits that can represent n, applied repeatedly until the result
is below n (cycle walking; Black and Rogaway, 2002, "Ciphers with Arbitrary Finite Domains").  Each entry is computed
separately, so the cost per sample does not depend on n, and resuming has no extra cost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64's multipliers


class Sampler:
    """Assigns samples to ranks in an order that depends only on `seed`.

    `samples` is the number of samples.  The only state is `consumed`; set it to resume.

        sampler = Sampler(samples=1000, seed=0)
        indices = sampler.next(count=16, rank=0, ranks=2)  # 8 indices; rank 1 gets the other 8

    Raises:
        ValueError: if `samples` is 0, or the `count` of a call is not a multiple of `ranks`.
    """

    def __init__(self, samples: int, seed: int, consumed: int = 0) -> None:
        if samples < 1:
            raise ValueError(f"expected at least one sample, got {samples}")
        self.samples = samples
        self.seed = seed
        self.consumed = consumed

    def next(self, count: int, rank: int, ranks: int) -> NDArray[np.int64]:
        """Consume `count` samples, and return the indices of this rank's samples.

        `count` must be a multiple of `ranks`.
        """
        return self.at(self.take(count, rank, ranks))

    def take(self, count: int, rank: int, ranks: int) -> NDArray[np.int64]:
        """Consume `count` samples, and return the positions of this rank's samples in the run.

        Positions are counted from 0 across all epochs.  `count` must be a multiple of `ranks`.
        """
        if count % ranks:
            raise ValueError(
                f"expected the number of samples to be a multiple of the number of ranks ({ranks}), got {count}"
            )
        share = count // ranks
        first = self.consumed + rank * share
        self.consumed += count
        return np.arange(first, first + share)

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of the samples at `positions` in the run."""
        epochs, indices = np.divmod(positions, self.samples)
        result = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = permute(indices[chosen], self.samples, self.seed, int(epoch))
        return result

    def epochs(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the epoch (counted from 0) of each position in the run."""
        return positions // self.samples


def permute(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the entries at `indices` in the permutation of 0..size-1 for `seed` and `epoch`."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    values = _feistel(indices.astype(np.uint64), half, keys)
    while (outside := values >= size).any():  # on average at most 4 passes per entry: 2^bits <= 4 size
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << half) | right


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64, a pseudorandom bijection on 64-bit integers."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))
