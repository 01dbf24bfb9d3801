"""Rabenseifner's all-reduce, which sends few messages and few bytes.

A reduce-scatter by recursive halving is followed by an all-gather by recursive doubling.

R. Rabenseifner: Optimization of collective reduction operations (2004).
"""

from __future__ import annotations

from torch import Tensor

from farandole.comm.algorithms import doubling, halving
from farandole.comm.algorithms.steps import Combine, PowerOfTwo, Steps, Store, split
from farandole.comm.transport import Transport


def all_reduce(
    transport: Transport,
    tensor: Tensor,
    combine: Combine,
    result: Tensor | None = None,
    store: Store | None = None,
) -> Steps:
    """All-reduce a one-dimensional tensor, with the same arguments as `ring.all_reduce`.

    With p = 2^k ranks, each rank sends 2 (p - 1)/p times the size of the tensor, in 2 k messages.  If the number of
    ranks is not a power of two, only the first p ranks send these messages, where p is the largest possible power of
    two.  Each remaining rank first sends its tensor to one of these ranks, and finally receives the result.
    """
    result = tensor if result is None else result
    inner = PowerOfTwo(transport)
    if inner.outside:
        yield from inner.delegate(tensor, result)
        return
    yield from inner.combine_outside(tensor, combine)
    parts, results = split(tensor, inner.size), split(result, inner.size)
    yield from halving.reduce_scatter(inner, parts, combine)
    if store:
        store(results[inner.rank], parts[inner.rank])
    yield from doubling.all_gather(inner, results)
    yield from inner.send_outside(result)


def all_reduce_cost(ranks: int, size: int, latency_s: float, seconds_per_byte: float) -> float:
    """Return the predicted time in seconds of an all-reduce of `size` bytes among `ranks` ranks."""
    steps = ranks.bit_length() - 1
    inner = 1 << steps
    seconds = 2 * steps * latency_s + 2 * (inner - 1) / inner * size * seconds_per_byte
    return seconds + (0 if inner == ranks else 2 * (latency_s + size * seconds_per_byte))
