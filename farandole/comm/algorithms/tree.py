"""Broadcast and reduce over a binomial tree for small tensors, or along a chain for large tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Combine, Steps
from farandole.comm.transport import Transport

CHAIN_BYTES = 1 << 16
"""The message size in bytes above which the transmission time exceeds the latency, so that a chain is faster."""


def broadcast(transport: Transport, tensor: Tensor, root: int) -> Steps:
    """Copy the root's tensor to all other ranks, along a tree or a chain depending on its size."""
    small = tensor.numel() * tensor.element_size() < CHAIN_BYTES
    return binomial(transport, tensor, root) if small else chain(transport, tensor, root)


def binomial(transport: Transport, tensor: Tensor, root: int) -> Steps:
    """Broadcast over a binomial tree; in step k (from 0 on), up to 2^k ranks send the tensor to one more rank each."""
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
    """Broadcast along a chain of p ranks, in p - 1 steps.

    Each link carries the values once, so windows of a large tensor can be pipelined.
    """
    n = transport.size
    place = (transport.rank - root) % n
    if place:
        yield transport.recv(tensor, (transport.rank - 1) % n)
    if place < n - 1:
        yield transport.send(tensor, (transport.rank + 1) % n)


def reduce(transport: Transport, tensor: Tensor, root: int, combine: Combine) -> Steps:
    """Reduce the tensors of all ranks into the root's tensor; tensors on other ranks may be overwritten."""
    small = tensor.numel() * tensor.element_size() < CHAIN_BYTES
    return (reduce_binomial if small else reduce_chain)(transport, tensor, root, combine)


def reduce_binomial(transport: Transport, tensor: Tensor, root: int, combine: Combine) -> Steps:
    """Reduce over a binomial tree; in step k (from 0 on), ranks send partial results to the rank 2^k places lower.

    With p ranks, there are ceil(log2(p)) steps.
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
    """Reduce along a chain of p ranks, in p - 1 steps.

    Each link carries the values once, so windows of a large tensor can be pipelined.
    """
    n = transport.size
    place = (transport.rank - root) % n
    if place < n - 1:
        spare = torch.empty_like(tensor)
        yield transport.recv(spare, (transport.rank + 1) % n)
        combine(tensor, tensor, spare)
    if place:
        yield transport.send(tensor, (transport.rank - 1) % n)
