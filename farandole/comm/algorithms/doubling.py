"""Recursive doubling, which sends few messages but many bytes.

In step k (counted from 0), rank r exchanges values with rank r XOR 2^k.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH (2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Combine, PowerOfTwo, Steps, Store, in_order, joined, power_of_two
from farandole.comm.transport import Transport


def all_reduce(
    transport: Transport,
    tensor: Tensor,
    combine: Combine,
    result: Tensor | None = None,
    store: Store | None = None,
) -> Steps:
    """All-reduce a one-dimensional tensor, with the same arguments as `ring.all_reduce`.

    With 2^k ranks, there are k steps, and each rank sends the whole tensor in every step.  If the number of ranks is
    not a power of two, only the first 2^k ranks run these steps, with the largest possible k.  Each remaining rank
    sends its tensor to one of these ranks before the first step, and receives the result after the last step.
    Partners combine their values in rank order, so all ranks get bitwise equal results.
    """
    result = tensor if result is None else result
    inner = PowerOfTwo(transport)
    if inner.outside:
        yield from inner.delegate(tensor, result)
        return
    yield from inner.combine_outside(tensor, combine)
    spare, distance = torch.empty_like(tensor), 1
    while distance < inner.size:
        partner = inner.rank ^ distance
        send = inner.send(tensor, partner)
        yield inner.recv(spare, partner)
        yield send  # the next line overwrites the values that are being sent
        in_order(combine, tensor, spare, inner.rank < partner)
        distance *= 2
    if store:
        store(result, tensor)
    yield from inner.send_outside(result)


def all_gather(transport: Transport, parts: Sequence[Tensor]) -> Steps:
    """Copy part i from rank i to all other ranks.

    If there are p ranks, each rank sends p - 1 parts in log2(p) messages.

    Args:
        transport: The transport among the ranks.
        parts: Adjacent parts of one tensor, as returned by `split`.

    Raises:
        ValueError: if the number of ranks is not a power of two.
    """
    me, distance = transport.rank, 1
    while distance < power_of_two(transport.size):
        partner = me ^ distance
        first = me & -distance  # the first part that this rank has
        theirs = first ^ distance
        send = transport.send(joined(parts[first : first + distance]), partner)
        yield transport.recv(joined(parts[theirs : theirs + distance]), partner)
        yield send
        distance *= 2


def all_reduce_cost(ranks: int, size: int, latency_s: float, seconds_per_byte: float) -> float:
    """Return the predicted time in seconds of an all-reduce of `size` bytes among `ranks` ranks."""
    steps = ranks.bit_length() - 1 + (0 if ranks & (ranks - 1) == 0 else 2)
    return steps * (latency_s + size * seconds_per_byte)
