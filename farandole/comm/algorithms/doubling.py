"""Recursive doubling: in step k ranks at distance 2^k exchange all they have.  Few messages, many bytes.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH (2005).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Combine, Steps, in_order
from farandole.comm.transport import Transport


def all_reduce(transport: Transport, tensor: Tensor, combine: Combine) -> Steps:
    """Reduce in place: log2(p) (latency + S per byte), and 2 more of each if p is no power of two.

    Partners combine in the order of their ranks, so that all ranks get the same bits.
    """
    me, spare = transport.rank, torch.empty_like(tensor)
    circle = 1 << (transport.size.bit_length() - 1)
    extra = transport.size - circle
    if me >= circle:  # a rank too many: it gives its values to one of the circle, and waits for the result
        send = transport.send(tensor, me - circle)
        yield send
        yield transport.recv(tensor, me - circle)
        return
    if me < extra:
        yield transport.recv(spare, me + circle)
        combine(tensor, tensor, spare)
    distance = 1
    while distance < circle:
        partner = me ^ distance
        send = transport.send(tensor, partner)
        yield transport.recv(spare, partner)
        yield send  # before the values that it sends are changed
        in_order(combine, tensor, spare, me < partner)
        distance *= 2
    if me < extra:
        yield transport.send(tensor, me + circle)


def all_reduce_cost(ranks: int, size: int, latency_s: float, seconds_per_byte: float) -> float:
    """Seconds for `size` bytes."""
    steps = int(math.log2(ranks)) + (0 if ranks & (ranks - 1) == 0 else 2)
    return steps * (latency_s + size * seconds_per_byte)
