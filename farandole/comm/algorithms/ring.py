"""Ring algorithms, which send the minimum number of bytes but many messages.

Every rank sends to its right neighbor and receives from its left neighbor.

P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Combine, Steps, Store, split
from farandole.comm.transport import Pending, Transport


def all_reduce(
    transport: Transport,
    tensor: Tensor,
    combine: Combine,
    result: Tensor | None = None,
    store: Store | None = None,
) -> Steps:
    """All-reduce a one-dimensional tensor.

    If there are p ranks, each rank sends 2 (p - 1) messages, each with 1/p of the tensor.  Each part of the tensor
    is reduced once, along the ring, and the total is then copied to all ranks.  All ranks therefore get bitwise
    equal results.

    Args:
        transport: The transport among the ranks.
        tensor: The input.  It is overwritten with the results or, if `result` is given, with partial results.
        combine: The reduction.
        result: The output tensor, by default `tensor`.  If its dtype is narrower than the dtype of `tensor`, results
            are sent in the narrower dtype.
        store: A function that converts a total to a result, required if `result` is a separate tensor.  By default,
            the totals are the results.
    """
    parts = split(tensor, transport.size)
    results = parts if result is None else split(result, transport.size)
    yield from reduce_scatter(transport, parts, combine)
    if store:
        store(results[transport.rank], parts[transport.rank])
    yield from all_gather(transport, results)


def reduce_scatter(transport: Transport, parts: Sequence[Tensor], combine: Combine) -> Steps:
    """Reduce part i over all ranks, store the result in part i on rank i, and overwrite the other parts.

    If there are p ranks, each rank sends p - 1 messages, each with one part.
    """
    n, me = transport.size, transport.rank
    spare = torch.empty(max(part.numel() for part in parts), dtype=parts[0].dtype, device="cpu")
    sends: list[Pending] = []
    for step in range(1, n):
        outgoing, own = parts[(me - step) % n], parts[(me - step - 1) % n]
        incoming = spare[: own.numel()]
        sends.append(transport.send(outgoing, (me + 1) % n))
        yield transport.recv(incoming, (me - 1) % n)
        combine(own, incoming, own)
    yield from sends


def all_gather(transport: Transport, parts: Sequence[Tensor]) -> Steps:
    """Copy part i from rank i to all other ranks.

    If there are p ranks, each rank sends p - 1 messages, each with one part.
    """
    n, me = transport.size, transport.rank
    sends: list[Pending] = []
    for step in range(n - 1):
        sends.append(transport.send(parts[(me - step) % n], (me + 1) % n))
        yield transport.recv(parts[(me - step - 1) % n], (me - 1) % n)
    yield from sends


def all_reduce_cost(ranks: int, size: int, latency_s: float, seconds_per_byte: float) -> float:
    """Return the predicted time in seconds of an all-reduce of `size` bytes among `ranks` ranks."""
    return 2 * (ranks - 1) * latency_s + 2 * (ranks - 1) / ranks * size * seconds_per_byte
