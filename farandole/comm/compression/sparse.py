"""Top-k compression, which sends only the largest-magnitude values in each share.

S. U. Stich et al.: Sparsified SGD with memory (2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.algorithms.ring import all_gather
from farandole.comm.algorithms.steps import Reduce, Steps
from farandole.comm.compression.base import Compression, Compressor, Parameters, compensated, remember
from farandole.comm.transport import Transport


@dataclass(frozen=True)
class TopK(Compression):
    """Sends only the values with the largest magnitudes, and their indices.

    The number of values sent is `ratio` times the number of values, rounded up.  A value and its index take 8 bytes.
    Each host receives the values that all other hosts send.  With p hosts and a tensor of S bytes in fp32, each host
    therefore receives (p - 1) * ratio * 2 S bytes.

    Raises:
        ValueError: unless 0 < `ratio` <= 1.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"TopK: expected 0 < ratio <= 1, got {self.ratio}")

    def _compressor(self, count: int, parameters: Parameters, exact: int) -> Compressor:
        return TopKCompressor(self, count, parameters, exact)


class TopKCompressor(Compressor):
    """A compressor that sends only the values with the largest magnitudes in each share."""

    def __init__(self, compression: TopK, count: int, parameters: Parameters, exact: int) -> None:
        super().__init__(compression, count, parameters, exact)
        self._ratio = compression.ratio

    def sent_fraction(self, hosts: int) -> float:
        """Return the ratio of the bytes sent (values and indices) to the bytes of an uncompressed fp32 all-reduce."""
        return self._ratio * hosts

    def reduce(
        self, share: Tensor, transport: Transport, start: int, factor: float, exactly: Reduce
    ) -> Steps:
        """Replace `share` with the sum of the values that all hosts send, added in host order."""
        residual = self.residual(start, share)
        values = compensated(share, factor, residual)
        kept = math.ceil(self._ratio * values.numel())
        places = values.abs().topk(kept, sorted=False).indices  # a NaN counts as the largest value
        chosen = values[places]
        # infinities must not enter the residual
        values[places] = torch.where(chosen.isfinite(), 0.0, torch.nan)
        remember(residual, values)
        messages = [torch.empty(2 * kept, dtype=torch.int32, device="cpu") for _ in range(transport.size)]
        own_places, own_values = messages[transport.rank].split(kept)
        own_places.copy_(places)
        own_values.view(torch.float32).copy_(chosen)
        yield from all_gather(transport, messages)
        share.zero_()
        for message in messages:
            places, found = message.split(kept)
            share.index_add_(0, places, found.view(torch.float32))
