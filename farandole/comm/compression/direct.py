"""All-reduce of encoded values: all ranks send part i to rank i, which sends the encoded sum back to all ranks.

Each value is encoded twice, once as a summand and once as a sum.  In a ring among p ranks, each value would be encoded
p times.  Error feedback corrects the errors of both encodings: H. Tang et al., DoubleSqueeze: parallel stochastic
gradient descent with double-pass error-compensated compression (2019).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from farandole.comm.algorithms.steps import Steps, split
from farandole.comm.transport import Transport


class Encoder(Protocol):
    """Encodes values as messages, and decodes messages.

    The length of a message depends only on the number of values.
    """

    def message(self, count: int) -> Tensor:
        """Return an uninitialized buffer for a message of `count` values."""

    def encode(
        self, x: Tensor, factor: float, residual: Tensor | None, decoded: Tensor | None = None
    ) -> Tensor:
        """Return a message that encodes `x * factor + residual`.

        The encoding error is stored in `residual`.  The values that the receiver will decode are stored in `decoded`.
        Both arguments may be None.
        """

    def decode(self, message: Tensor, x: Tensor, factor: float = 0.0) -> None:
        """Set `x` to `x * factor` plus the values decoded from `message`."""


def all_reduce(
    transport: Transport, tensor: Tensor, codec: Encoder, residual: Tensor | None, factor: float
) -> Steps:
    """Replace a one-dimensional tensor with the sum of `factor * tensor` over all ranks.

    All ranks, including the rank that sums a part, decode the sum from the same message.  The results are therefore
    bitwise equal on all ranks.  With p ranks, each rank sends 2 (p - 1)/p times the encoded size, in two rounds of
    messages.

    Args:
        transport: The transport among the ranks.
        tensor: The values of this rank, which are overwritten with the sum.
        codec: The encoder of the messages.
        residual: The compression errors of the previous call, or None.  The errors are added to the values and then
            overwritten with the errors of this call.
        factor: The factor by which the values are multiplied before they are summed.
    """
    me, n = transport.rank, transport.size
    parts = split(tensor, n)
    missed = [None] * n if residual is None else split(residual, n)
    others = [(me + turn) % n for turn in range(1, n)]  # each rank starts with a different peer
    own = parts[me]
    sends = []
    summands = {r: codec.message(own.numel()) for r in others if own.numel()}
    arrivals = {r: transport.recv(message, r) for r, message in summands.items()}
    for r in others:
        if parts[r].numel():
            sends.append(transport.send(codec.encode(parts[r], factor, missed[r]), r))
    sums = {r: codec.message(parts[r].numel()) for r in others if parts[r].numel()}
    results = {r: transport.recv(message, r) for r, message in sums.items()}

    for r in sorted(arrivals):
        yield arrivals[r]
        codec.decode(summands.pop(r), own, factor)
        factor = 1.0
    if own.numel():
        encoded = codec.encode(own, factor, missed[me], decoded=own)
        sends += [transport.send(encoded, r) for r in others]
    for r, result in results.items():
        yield result
        codec.decode(sums.pop(r), parts[r])
    yield from sends


def all_reduce_cost(ranks: int, size: int, latency_s: float, seconds_per_byte: float, ratio: float) -> float:
    """Return the predicted time in seconds of an all-reduce of `size` bytes, compressed to `size / ratio` bytes."""
    return 2 * (latency_s + (ranks - 1) / ranks * size / ratio * seconds_per_byte)
