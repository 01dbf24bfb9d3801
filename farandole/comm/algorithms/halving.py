"""Recursive halving, which sends few messages and few bytes.

In each step, two partners split their current range of values into halves, one for each partner.  They exchange
values, so that each partner reduces its half.  This half is the range in its next step.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH (2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Combine, Steps, in_order, joined, power_of_two
from farandole.comm.transport import Transport


def reduce_scatter(transport: Transport, parts: Sequence[Tensor], combine: Combine) -> Steps:
    """Reduce part i over all ranks, and store the result in part i on rank i.

    If there are p ranks, each rank sends p - 1 parts in log2(p) messages.

    Args:
        transport: The transport among the ranks.
        parts: Adjacent parts of one tensor, as returned by `split`.  The other parts on rank i may be
            overwritten with partial results.
        combine: The reduction.

    Raises:
        ValueError: if the number of ranks is not a power of two.
    """
    me, distance = transport.rank, power_of_two(transport.size) // 2
    first, last = 0, transport.size  # the range of parts that this rank still reduces
    while distance:
        partner, middle = me ^ distance, first + distance
        lower, upper = joined(parts[first:middle]), joined(parts[middle:last])
        kept, given = (upper, lower) if me & distance else (lower, upper)
        incoming = torch.empty_like(kept)
        send = transport.send(given, partner)
        yield transport.recv(incoming, partner)
        in_order(combine, kept, incoming, me < partner)
        yield send
        first, last = (middle, last) if me & distance else (first, middle)
        distance //= 2
