"""Adasum: a sum of gradients that takes into account how far they point the same way.

Maleki et al., 2020, "Scaling Distributed Training with Adaptive Summation" (arXiv:2006.02924).  Two gradients
a and b become

    (1 - a.b / 2|a|^2) a  +  (1 - a.b / 2|b|^2) b

which is their sum if they are orthogonal and their mean if they are equal.  More ranks combine in pairs, then pairs
of pairs, so that their number must be a power of two.  Each tensor of a fused buffer has its own
coefficients (the paper's per-layer variant).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Return the Adasum of two tensors of one shape, in their type, with coefficients computed in float64.

    A tensor of zeros contributes nothing.
    """
    one, other = a.reshape(-1).double(), b.reshape(-1).double()
    dot, a_square, b_square = one @ other, one @ one, other @ other
    a_weight = torch.where(a_square > 0, 1 - dot / (2 * a_square), 1.0)
    b_weight = torch.where(b_square > 0, 1 - dot / (2 * b_square), 1.0)
    return (a_weight * one + b_weight * other).view(a.shape).to(a.dtype)


def adasum(flat: Tensor, parts: Callable[[Tensor], Sequence[Tensor]], group: dist.ProcessGroup) -> None:
    """Replace the parts of `flat` by their Adasum over the ranks of the group, in place.

    In round k a rank exchanges its whole vector with the rank whose number differs in bit k; both compute the
    same combination, lower rank first, so that all ranks end with the same bits.
    """
    rank, size = group.rank(), group.size()
    theirs = torch.empty_like(flat)
    distance = 1
    while distance < size:
        peer = rank ^ distance
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, flat.clone(), group=group, group_peer=peer),
                dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()
        low, high = (flat, theirs) if rank < peer else (theirs, flat)
        for part, a, b in zip(parts(flat), parts(low), parts(high), strict=True):
            part.copy_(combine(a, b))
        distance *= 2


def unsuitable(size: int) -> str | None:
    """Return why Adasum cannot be used among `size` ranks, or None."""
    if size & (size - 1):
        return f"Running Adasum with {size} ranks is not possible: their number must be a power of 2"
    return None
