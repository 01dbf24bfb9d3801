"""Broadcast and reduce over a binomial tree for small tensors, or along a chain for large tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Combine, Steps
from farandole.comm.transport import Transport

CHAIN_BYTES = 1 << 16
"""Tensors of at least this number of bytes use a chain.

Above about this size, the transmission of a message takes longer than its latency, so a chain is faster than a tree.
"""


def broadcast(transport: Transport, tensor: Tensor, root: int) -> Steps:
    """Copy `tensor` from rank `root` to all other ranks.

    Small tensors are sent over a binomial tree, and other tensors along a chain.
    """
    small = tensor.numel() * tensor.element_size() < CHAIN_BYTES
    return binomial(transport, tensor, root) if small else chain(transport, tensor, root)


def binomial(transport: Transport, tensor: Tensor, root: int) -> Steps:
    """Broadcast `tensor` over a binomial tree.

    In step k (counted from 0), each rank that has the tensor (at most 2^k ranks) sends it to one more rank.
    """
    n = transport.size
    place = (transport.rank - root) % n
    low = place & -place if place else 1 << math.ceil(math.log2(n)) if n > 1 else 1
    if place:
        yield transport.recv(tensor, (place - low + root) % n)
    sends = []
    distance = low // 2
    while distance:
        if place + distance < n:
            sends.append(transport.send(tensor, (place + distance + root) % n))
        distance //= 2
    yield from sends


def chain(transport: Transport, tensor: Tensor, root: int) -> Steps:
    """Broadcast `tensor` along a chain: each rank receives from its left neighbor and sends to its right neighbor.

    With p ranks, there are p - 1 steps.  Each rank sends the tensor at most once, so the chunks of a large tensor can
    be pipelined.
    """
    n = transport.size
    place = (transport.rank - root) % n
    if place:
        yield transport.recv(tensor, (transport.rank - 1) % n)
    if place < n - 1:
        yield transport.send(tensor, (transport.rank + 1) % n)


def reduce(transport: Transport, tensor: Tensor, root: int, combine: Combine) -> Steps:
    """Reduce `tensor` into the tensor on rank `root`.

    Small tensors are reduced over a binomial tree, and other tensors along a chain.  The tensors on the other ranks
    may be overwritten with partial results.
    """
    small = tensor.numel() * tensor.element_size() < CHAIN_BYTES
    return (reduce_binomial if small else reduce_chain)(transport, tensor, root, combine)


def reduce_binomial(transport: Transport, tensor: Tensor, root: int, combine: Combine) -> Steps:
    """Reduce `tensor` over a binomial tree into the tensor on rank `root`.

    With p ranks, the relative rank is (rank - root) mod p.  In step k (counted from 0), each rank whose relative
    rank is an odd multiple of 2^k sends its partial result to the rank whose relative rank is lower by 2^k, and is
    then finished.  There are ceil(log2(p)) steps.
    """
    n = transport.size
    place = (transport.rank - root) % n
    spare, distance = torch.empty_like(tensor), 1
    while distance < n and not place & distance:
        if place + distance < n:
            yield transport.recv(spare, (place + distance + root) % n)
            combine(tensor, tensor, spare)
        distance *= 2
    if place:
        yield transport.send(tensor, (place - distance + root) % n)


def reduce_chain(transport: Transport, tensor: Tensor, root: int, combine: Combine) -> Steps:
    """Reduce `tensor` along a chain: each rank combines its values with the partial result of its right neighbor.

    With p ranks, there are p - 1 steps.  Each rank sends its partial result at most once, so the chunks of a large
    tensor can be pipelined.
    """
    n = transport.size
    place = (transport.rank - root) % n
    if place < n - 1:
        spare = torch.empty_like(tensor)
        yield transport.recv(spare, (transport.rank + 1) % n)
        combine(tensor, tensor, spare)
    if place:
        yield transport.send(tensor, (transport.rank - 1) % n)
