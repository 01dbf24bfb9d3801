"""Rabenseifner's all-reduce: a reduce-scatter by halving, then an all-gather by doubling.  Few messages and few bytes.

R. Rabenseifner: Optimization of collective reduction operations (2004).
"""

from __future__ import annotations

from torch import Tensor

from farandole.comm.algorithms import doubling, halving
from farandole.comm.algorithms.steps import Circle, Combine, Steps, split
from farandole.comm.transport import Transport


def all_reduce(transport: Transport, tensor: Tensor, combine: Combine) -> Steps:
    """Reduce a one-dimensional tensor in place: 2 log2(p) latency + 2 (p - 1)/p S per byte.

    If p is no power of two, the ranks too many cost 2 (latency + S per byte) more.
    """
    circle = Circle(transport)
    if circle.outside:
        yield from circle.stand_by(tensor)
        return
    yield from circle.take_in(tensor, combine)
    parts = split(tensor, circle.size)
    yield from halving.reduce_scatter(circle, parts, combine)
    yield from doubling.all_gather(circle, parts)
    yield from circle.give_out(tensor)


def all_reduce_cost(ranks: int, size: int, latency_s: float, seconds_per_byte: float) -> float:
    """Seconds for `size` bytes."""
    steps = ranks.bit_length() - 1
    circle = 1 << steps
    seconds = 2 * steps * latency_s + 2 * (circle - 1) / circle * size * seconds_per_byte
    return seconds + (0 if circle == ranks else 2 * (latency_s + size * seconds_per_byte))
