"""BERT-style token masking (Devlin et al., 2019, "BERT", section 3.1).

15 % of the ordinary (non-special) tokens are selected.  Of the selected tokens, 80 % become the mask token, 10 % become
a random token, and 10 % remain unchanged.  As in the paper's code, exactly max(1, round(0.15 m)) tokens are
selected in a window with m ordinary tokens.

Masks are stateless: every position has a random 64-bit number, computed by splitmix64 (Steele et al., 2014, "Fast
Splittable Pseudorandom Number Generators") from the seed, the epoch, the sample and the position.  The mask of a sample
therefore does not depend on its rank or batch, and is the same after a run is resumed.

    masking = masking_for(text.tokenizer, seed=0)
    inputs, targets = masking.mask(windows, samples, epochs)     # targets are -100 at positions that are not selected
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from farandole.data.errors import DataError
from farandole.data.sampler import Sampler, mix
from farandole.data.text import Windows
from farandole.data.tokenizer import MASK

IGNORE_INDEX = -100
"""The target at positions that are not selected; torch's cross-entropy ignores it."""

_STEP = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment
_SECOND = np.uint64(0xD6E8FEB86659FD93)  # an arbitrary odd number, to derive a second number per position
_BATCH_WINDOWS = 64
"""The number of windows masked at a time, small enough that their random numbers stay in the cache."""


@dataclass(frozen=True)
class Masking:
    """Masks windows of tokens.

    Args:
        vocabulary: the number of tokens in the vocabulary.
        mask_token: the token that replaces selected tokens.
        special: tokens that are never selected or used as random tokens; `mask_token` is added automatically.
        seed: the seed for the random choices.
        share: the fraction of ordinary (non-special) tokens to select.

    Raises:
        ValueError: if an argument is out of range.
    """

    vocabulary: int
    mask_token: int
    special: tuple[int, ...]
    seed: int
    share: float = 0.15

    def __post_init__(self) -> None:
        for token in (self.mask_token, *self.special):
            if not 0 <= token < self.vocabulary:
                raise ValueError(f"expected tokens from 0 to {self.vocabulary - 1}, got {token}")
        if not 0 < self.share <= 1:
            raise ValueError(f"expected share above 0 and at most 1, got {self.share}")
        if self.seed < 0:
            raise ValueError(f"expected a non-negative seed, got {self.seed}")
        if len(self._ordinary) == 0:
            raise ValueError(
                f"expected at least one ordinary token in the vocabulary of {self.vocabulary} tokens, got only special "
                "tokens; increase vocabulary"
            )

    def mask(
        self, windows: NDArray[np.integer], samples: NDArray[np.int64], epochs: NDArray[np.int64] | int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Mask windows of tokens, and return the inputs and targets.

        Args:
            windows: tokens (n, positions).
            samples: the sample indices of the windows (n).
            epochs: the epochs of the windows (n), or one epoch for all windows.

        Returns:
            Inputs and targets, both int64 of shape (n, positions).  Every window with ordinary tokens has at least
            one target.

        Raises:
            ValueError: if the shapes do not match, or a token is not in the vocabulary.
        """
        if windows.ndim != 2 or samples.shape != windows.shape[:1]:
            raise ValueError(
                f"expected windows (n, positions) and samples (n), got shapes {windows.shape} and {samples.shape}"
            )
        inputs = windows.astype(np.int64)
        targets = np.full_like(inputs, IGNORE_INDEX)
        if inputs.size == 0:
            return inputs, targets
        if not 0 <= inputs.min() <= inputs.max() < self.vocabulary:
            wrong = inputs.min() if inputs.min() < 0 else inputs.max()
            raise ValueError(f"expected tokens from 0 to {self.vocabulary - 1}, got {wrong}")
        keys = self._keys(samples, np.broadcast_to(np.asarray(epochs), samples.shape))
        for start in range(0, len(windows), _BATCH_WINDOWS):
            part = slice(start, start + _BATCH_WINDOWS)
            self._mask(inputs[part], targets[part], keys[part])
        return inputs, targets

    def _mask(self, inputs: NDArray[np.int64], targets: NDArray[np.int64], keys: NDArray[np.uint64]) -> None:
        """Mask `inputs` in place, and write `targets`."""
        positions = np.arange(inputs.shape[1], dtype=np.uint64)
        numbers = mix(keys[:, None] + positions * _STEP)
        indices = np.nonzero(self._choose(inputs, numbers))
        chosen = inputs[indices]
        targets[indices] = chosen

        second = mix(numbers[indices] ^ _SECOND)
        others = self._ordinary[(mix(second + _STEP) % np.uint64(len(self._ordinary))).astype(np.int64)]
        tenth = (second >> np.uint64(32)) * np.uint64(10) >> np.uint64(32)  # 0 to 9 with equal probability
        inputs[indices] = np.select([tenth < 8, tenth == 8], [np.int64(self.mask_token), others], chosen)

    def _choose(self, tokens: NDArray[np.int64], numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return a mask of the selected tokens: in each window, the ordinary tokens with the smallest `numbers`."""
        special = self._is_special[tokens]
        many = tokens.shape[1] - special.sum(1)
        count = np.where(many > 0, np.maximum(1, np.rint(self.share * many).astype(np.int64)), 0)
        # the position replaces the low bits, so that numbers are unique; the top bit marks special tokens
        width = np.uint64(max(1, tokens.shape[1]).bit_length())
        unique = (numbers >> (width + np.uint64(1)) << width) | np.arange(tokens.shape[1], dtype=np.uint64)
        unique |= special.astype(np.uint64) << np.uint64(63)
        ranked = np.sort(unique, axis=1)
        last = np.take_along_axis(ranked, np.maximum(count - 1, 0)[:, None], axis=1)
        return (unique <= last) & (count > 0)[:, None]

    def _keys(self, samples: NDArray[np.int64], epochs: NDArray[np.int64]) -> NDArray[np.uint64]:
        seed = np.random.SeedSequence(self.seed).generate_state(1, np.uint64)
        return mix(mix(seed + epochs.astype(np.uint64) * _STEP) + samples.astype(np.uint64) * _STEP)

    @cached_property
    def _is_special(self) -> NDArray[np.bool_]:
        result = np.zeros(self.vocabulary, bool)
        result[[self.mask_token, *self.special]] = True
        return result

    @cached_property
    def _ordinary(self) -> NDArray[np.int64]:
        return np.flatnonzero(~self._is_special)


def masking_for(tokenizer: Tokenizer, seed: int, share: float = 0.15, mask: str = MASK) -> Masking:
    """Return a `Masking` that never selects the special tokens of `tokenizer`.

    Raises:
        DataError: if the tokenizer does not contain the token `mask`.
    """
    token = tokenizer.token_to_id(mask)
    if token is None:
        raise DataError(
            f"the tokenizer has no mask token {mask!r}; add it with prepare_text(..., special_tokens=({mask!r},))"
        )
    added = tokenizer.get_added_tokens_decoder()
    special = tuple(sorted(number for number, known in added.items() if known.special))
    return Masking(tokenizer.get_vocab_size(), token, special, seed, share)


class MaskedBatches:
    """Batches of masked windows; the order and the masks depend only on the seeds.

    The only state is `sampler.consumed`; set it to resume.

        batches = MaskedBatches(text.train, masking, Sampler(text.train.samples, seed=0))
        inputs, targets = batches.next(count=16, rank=0, ranks=2)    # 8 windows; rank 1 gets the other 8

    Raises:
        ValueError: if the sampler has more samples than there are windows.
    """

    def __init__(self, windows: Windows, masking: Masking, sampler: Sampler) -> None:
        if sampler.samples > windows.samples:
            raise ValueError(
                f"expected a sampler for at most {windows.samples} windows, got a sampler for {sampler.samples} samples"
            )
        self.windows = windows
        self.masking = masking
        self.sampler = sampler

    def next(self, count: int, rank: int, ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Consume the next `count` windows, and return the inputs and targets of this rank's windows."""
        positions = self.sampler.take(count, rank, ranks)
        return self.read(self.sampler.at(positions), self.sampler.epochs(positions))

    def read(
        self, samples: NDArray[np.int64], epochs: NDArray[np.int64] | int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the inputs and targets of `samples` in `epochs`, each of shape (len(samples), context)."""
        return self.masking.mask(self.windows.read(samples)[:, :-1], samples, epochs)
