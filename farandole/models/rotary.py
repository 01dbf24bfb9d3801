"""Compute rotary position embeddings (Su et al., 2021, "RoFormer").

Each pair of values in a head is rotated by the position times a frequency.  The dot product of a query and a key
therefore depends on their distance, but not on their absolute positions.  Value i is paired with value i + width / 2,
as in GPT-NeoX and Llama.  If `interleaved` is true, value 2 i is paired with value 2 i + 1, as in the paper and GPT-J.

Scalings extend a model to sequences that are longer than its training sequences:

    linear    positions are divided by `factor` (Chen et al., 2023, "Extending Context Window of Large Language Models")
    dynamic   the base grows with the sequence length (NTK-aware scaling)
    yarn      low frequencies are divided by `factor`, and high frequencies are unchanged, with a ramp in between
              (Peng et al., 2023, "YaRN")
    llama3    like `yarn`, with Llama 3.1's ramp
    longrope  each frequency is divided by its own factor, with different factors for sequences longer than the
              training sequences (Ding et al., 2024, "LongRoPE")

As in transformers, `dynamic` and `longrope` use the length of the longest sequence or packed document in the batch.
Unlike in transformers, the frequencies for `dynamic` do not depend on earlier, longer batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from farandole.models.derivatives import first_order
from farandole.models.replaceable import replaceable
from farandole.models.sequence import SequenceInfo

SCALINGS = ("linear", "dynamic", "yarn", "llama3", "longrope")

BASE = 10_000.0
"""The default base.  The slowest pair completes a rotation in about 2 pi times this number of positions."""


@dataclass(frozen=True)
class Rotary:
    """Rotates the first `width` values of each head in queries and keys.

    Args:
        width: the number of rotated values per head, even.
        scaling: one of `SCALINGS`, or None.
        factor: the factor by which the scaling extends the context.
        original: the maximum length of the training sequences before the extension.
        slow, fast: the ends of the ramp, as numbers of rotations over `original` positions.  Pairs with at most `slow`
            rotations are fully scaled, and pairs with at least `fast` rotations are unchanged.  The configuration names
            are `beta_slow` and `beta_fast` for `yarn`, and `low_freq_factor` and `high_freq_factor` for `llama3`.
        magnitude: the factor applied to sines and cosines.
        truncate: whether `yarn` rounds the ends of its ramp to whole pairs.
        short_factors, long_factors: one factor per pair, for `longrope`.  `short_factors` apply to sequences with at
            most `original` positions, and `long_factors` to longer sequences.

    Raises:
        ValueError: if the width is odd, the scaling is unknown, or the number of factors is wrong.
    """

    width: int
    base: float = BASE
    interleaved: bool = False
    scaling: str | None = None
    factor: float = 1.0
    original: int = 0
    slow: float = 1.0
    fast: float = 32.0
    magnitude: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"expected an even rotary dimension, got width={self.width}")
        if self.scaling is not None and self.scaling not in SCALINGS:
            raise ValueError(
                f"unknown scaling={self.scaling!r} for rotary positions; expected one of {', '.join(SCALINGS)}"
            )
        counts = (len(self.short_factors), len(self.long_factors))
        if self.scaling == "longrope" and set(counts) != {self.width // 2}:
            raise ValueError(
                f"expected {self.width // 2} short and {self.width // 2} long factors for width={self.width}, "
                f"got {counts[0]} and {counts[1]}"
            )

    @property
    def depends_on_length(self) -> bool:
        """Return whether the frequencies depend on the length of the sequences."""
        return self.scaling in ("dynamic", "longrope")

    def __call__(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        """Rotate `x` (batch, heads, positions, values) for the positions in `info`, by default 0, 1, ..."""
        info = info or SequenceInfo()
        length = x.shape[-2]
        start = info.cache.length if info.cache is not None else 0
        key = (self, start, length, x.dtype, x.device)
        cosine, sine = info.shared(key, lambda: self.table(info.positions_of(length, x.device), x.dtype))
        if x.shape[-1] == self.width:
            return rotate(x, cosine, sine, self.interleaved)
        rotated = rotate(x[..., : self.width], cosine, sine, self.interleaved)
        return torch.cat((rotated, x[..., self.width :]), -1)

    def table(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines (1 or batch, 1, positions, width / 2) for int64 `positions`."""
        frequencies = self.frequencies(positions)
        rows = positions.reshape(-1, positions.shape[-1]).float()
        angles = rows[:, None, :, None] * frequencies.to(positions.device)
        return (angles.cos() * self.magnitude).to(dtype), (angles.sin() * self.magnitude).to(dtype)

    def frequencies(self, positions: Tensor) -> Tensor:
        """Return the frequencies, of shape (width / 2), in radians per position."""
        base, exponents = self.base, torch.arange(0, self.width, 2).float() / self.width
        if self.scaling == "dynamic":
            length = max(_length(positions), self.original)
            stretch = self.factor * length / self.original - (self.factor - 1)
            base *= stretch ** (self.width / (self.width - 2))
        frequencies = 1.0 / base**exponents
        if self.scaling == "linear":
            return frequencies / self.factor
        if self.scaling == "yarn":
            first, last = (self._pair_with(rotations) for rotations in (self.fast, self.slow))
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.width - 1)
            last = last + 0.001 if first == last else last
            ramp = ((torch.arange(self.width // 2).float() - first) / (last - first)).clamp(0, 1)
            return frequencies / self.factor * ramp + frequencies * (1 - ramp)
        if self.scaling == "longrope":
            is_long = _length(positions) > self.original
            return frequencies / torch.tensor(self.long_factors if is_long else self.short_factors)
        if self.scaling == "llama3":
            rotations = self.original * frequencies / (2 * math.pi)
            kept = ((rotations - self.slow) / (self.fast - self.slow)).clamp(0, 1)
            return frequencies * (kept + (1 - kept) / self.factor)
        return frequencies

    def _pair_with(self, rotations: float) -> float:
        """Return the fractional index of the pair with `rotations` rotations over `original` positions."""
        return self.width * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.base))


def _length(positions: Tensor) -> int:
    """Return the largest position plus 1; in a dry run (no values), the number of positions."""
    return positions.shape[-1] if isinstance(positions, FakeTensor) else int(positions.max()) + 1


class _Rotate(torch.autograd.Function):
    """Rotates values.  The explicit backward pass, an inverse rotation, takes half as long as autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        return _rotate_pairs(x, cosine, sine, interleaved)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate_pairs(grad_outputs[0], cosine, -sine, ctx.interleaved), None, None, None


@replaceable
def rotate(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """Return `x`, of shape (batch, heads, positions, width), with each pair of values rotated."""
    rotated: Tensor = _Rotate.apply(x, cosine, sine, interleaved)
    return rotated


def _rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        to_first, to_second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = x.chunk(2, -1)
        to_first, to_second = rotated.chunk(2, -1)
    torch.addcmul(first * cosine, second, sine, value=-1, out=to_first)
    torch.addcmul(second * cosine, first, sine, out=to_second)
    return rotated
