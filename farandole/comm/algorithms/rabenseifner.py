"""Rabenseifner's all-reduce: recursive halving, then recursive doubling.  Few messages and few bytes.

R. Rabenseifner: Optimization of collective reduction operations (2004).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Combine, Steps, in_order
from farandole.comm.transport import Transport


def all_reduce(transport: Transport, tensor: Tensor, combine: Combine) -> Steps:
    """Reduce a one-dimensional tensor in place: 2 log2(p) latency + 2 (p - 1)/p S per byte.

    If p is no power of two, the ranks too many cost 2 (latency + S per byte) more.
    """
    me, spare = transport.rank, torch.empty_like(tensor)
    circle = 1 << (transport.size.bit_length() - 1)
    extra = transport.size - circle
    if me >= circle:
        yield transport.send(tensor, me - circle)
        yield transport.recv(tensor, me - circle)
        return
    if me < extra:
        yield transport.recv(spare, me + circle)
        combine(tensor, tensor, spare)

    # halving: keep the half that this rank's bit points to, give the other away
    halves: list[tuple[int, int, int, int]] = []  # partner, and bounds of what was split
    start, end, distance = 0, tensor.numel(), circle // 2
    while distance:
        partner, middle = me ^ distance, (start + end) // 2
        halves.append((partner, start, middle, end))
        upper = bool(me & distance)
        given = tensor[start:middle] if upper else tensor[middle:end]
        start, end = (middle, end) if upper else (start, middle)
        kept, incoming = tensor[start:end], spare[start:end]
        send = transport.send(given, partner)
        yield transport.recv(incoming, partner)
        in_order(combine, kept, incoming, me < partner)
        yield send
        distance //= 2

    # doubling: the same way back
    for partner, first, middle, last in reversed(halves):
        upper = me > partner
        own = tensor[middle:last] if upper else tensor[first:middle]
        other = tensor[first:middle] if upper else tensor[middle:last]
        send = transport.send(own, partner)
        yield transport.recv(other, partner)
        yield send
    if me < extra:
        yield transport.send(tensor, me + circle)


def all_reduce_cost(ranks: int, size: int, latency_s: float, seconds_per_byte: float) -> float:
    """Seconds for `size` bytes."""
    circle = 1 << (ranks.bit_length() - 1)
    seconds = 2 * math.log2(circle) * latency_s + 2 * (circle - 1) / circle * size * seconds_per_byte
    return seconds + (0 if circle == ranks else 2 * (latency_s + size * seconds_per_byte))
