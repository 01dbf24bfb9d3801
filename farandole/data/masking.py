"""BERT's masking: which tokens of a window are to be restored, and what stands there instead.

Of the tokens that are not special, 15 % are chosen; of these 80 % become the mask, 10 % another token and 10 %
stay (Devlin et al., 2019, "BERT", section 3.1).  The share is exact, as in the paper's code: a window of m
such tokens has max(1, round(0.15 m)) chosen ones, so that windows cost the same.

Nothing is drawn one after the other: every position has a number of 64 bits, made by splitmix64 (Steele et al.,
2014, "Fast Splittable Pseudorandom Number Generators") from the seed, the epoch, the sample and the position.
So a sample is masked in the same way whichever rank has it, in whichever batch, and after a stop.

    masking = masking_for(text.tokenizer, seed=0)
    inputs, targets = masking.mask(windows, samples, epochs)     # targets are -100 where nothing is to be restored
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

NOT_CHOSEN = -100
"""The target where nothing is to be restored: what torch's cross-entropy ignores."""

_STEP = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's
_ANOTHER = np.uint64(0xD6E8FEB86659FD93)  # any odd number; makes a second number of a position's first
_WINDOWS_AT_ONCE = 64
"""Few enough that their numbers stay in the cache."""


@dataclass(frozen=True)
class Masking:
    """Masks windows of tokens of a `vocabulary`.

    `mask_token` is put in; `special` ones are never chosen nor put in for another (`mask_token` is among
    them, whether named or not).  `share` of the others is chosen.
    """

    vocabulary: int
    mask_token: int
    special: tuple[int, ...]
    seed: int
    share: float = 0.15

    def __post_init__(self) -> None:
        for token in (self.mask_token, *self.special):
            if not 0 <= token < self.vocabulary:
                raise ValueError(f"token {token} is not in a vocabulary of {self.vocabulary}")
        if not 0 < self.share <= 1:
            raise ValueError(f"the share of tokens to choose is above 0 and at most 1, not {self.share}")
        if self.seed < 0:
            raise ValueError(f"a seed is not negative, as {self.seed} is")
        if len(self._ordinary) == 0:
            raise ValueError("all tokens of the vocabulary are special: there is nothing to restore")

    def mask(
        self, windows: NDArray[np.integer], samples: NDArray[np.int64], epochs: NDArray[np.int64] | int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets, both (n, positions), of windows (n, positions) that are `samples` (n) of `epochs`.

        A window that has any token to choose has a target; one of special tokens alone has none.
        """
        if windows.ndim != 2 or samples.shape != windows.shape[:1]:
            raise ValueError(f"windows {windows.shape} are not as many as samples {samples.shape}")
        inputs = windows.astype(np.int64)
        targets = np.full_like(inputs, NOT_CHOSEN)
        if inputs.size == 0:
            return inputs, targets
        if not 0 <= inputs.min() <= inputs.max() < self.vocabulary:
            wrong = inputs.min() if inputs.min() < 0 else inputs.max()
            raise ValueError(f"token {wrong} is not in the vocabulary of {self.vocabulary}")
        keys = self._keys(samples, np.broadcast_to(np.asarray(epochs), samples.shape))
        for start in range(0, len(windows), _WINDOWS_AT_ONCE):
            part = slice(start, start + _WINDOWS_AT_ONCE)
            self._mask(inputs[part], targets[part], keys[part])
        return inputs, targets

    def _mask(self, inputs: NDArray[np.int64], targets: NDArray[np.int64], keys: NDArray[np.uint64]) -> None:
        """Of a few windows; `inputs` hold the tokens before."""
        positions = np.arange(inputs.shape[1], dtype=np.uint64)
        numbers = mix(keys[:, None] + positions * _STEP)
        places = np.nonzero(self._choose(inputs, numbers))
        chosen = inputs[places]
        targets[places] = chosen

        second = mix(numbers[places] ^ _ANOTHER)
        others = self._ordinary[(mix(second + _STEP) % np.uint64(len(self._ordinary))).astype(np.int64)]
        tenth = (second >> np.uint64(32)) * np.uint64(10) >> np.uint64(32)  # 0 to 9, equally likely
        inputs[places] = np.select([tenth < 8, tenth == 8], [np.int64(self.mask_token), others], chosen)

    def _choose(self, tokens: NDArray[np.int64], numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """In every window the positions with the lowest numbers among those that are not special."""
        special = self._is_special[tokens]
        many = tokens.shape[1] - special.sum(1)
        count = np.where(many > 0, np.maximum(1, np.rint(self.share * many).astype(np.int64)), 0)
        # the number's last bits give way to the position, so that no two are the same; the first says special
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
    """Masking with the mask token of this tokenizer, never of its special tokens.  `DataError` if it has none."""
    token = tokenizer.token_to_id(mask)
    if token is None:
        raise DataError(
            f"the tokenizer has no token {mask!r} to mask with; give it one: "
            f"prepare_text(..., special_tokens=({mask!r},))"
        )
    added = tokenizer.get_added_tokens_decoder()
    special = tuple(sorted(number for number, known in added.items() if known.special))
    return Masking(tokenizer.get_vocab_size(), token, special, seed, share)


class MaskedBatches:
    """Batches of masked windows, in an order and with masks that depend only on the seeds.

    `sampler.consumed` is the whole state: save it, set it, go on.

        batches = MaskedBatches(text.train, masking, Sampler(text.train.samples, seed=0))
        inputs, targets = batches.next(count=16, rank=0, ranks=2)    # 8 windows; rank 1 gets the other 8
    """

    def __init__(self, windows: Windows, masking: Masking, sampler: Sampler) -> None:
        if sampler.samples > windows.samples:
            raise ValueError(
                f"the sampler draws from {sampler.samples} samples, and there are {windows.samples}"
            )
        self.windows = windows
        self.masking = masking
        self.sampler = sampler

    def next(self, count: int, rank: int, ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """This rank's share of the next `count` windows, as inputs and targets, and move on."""
        positions = self.sampler.take(count, rank, ranks)
        return self.read(self.sampler.at(positions), self.sampler.epochs(positions))

    def read(
        self, samples: NDArray[np.int64], epochs: NDArray[np.int64] | int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """These windows as inputs and targets, (len(samples), context), with the masks of these epochs."""
        return self.masking.mask(self.windows.read(samples)[:, :-1], samples, epochs)
