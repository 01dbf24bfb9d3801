"""Compare the gradients of operations with the gradients of one process in which all ranks' inputs are leaves.

Horovod's convention: the loss is the average of the ranks' losses.
"""

from __future__ import annotations

import pytest
import torch

import farandole.horovod.torch as hvd
from tests.horovod.jobs import all_given, close, given, session


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def gradients(rank, size):
    with session():
        weights = all_given(size, (6, 2), seed=9)  # rank r's loss is sum(result * weights[r])
        everyone = all_given(size, (6, 2))

        for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
            mine = _leaf(everyone[rank])
            (hvd.allreduce(mine, name=f"reduced.{op}", op=op) * weights[rank]).sum().backward()
            close(mine.grad, weights.mean(0) * factor)

        mine = _leaf(everyone[rank])
        (hvd.broadcast(mine, size - 1) * weights[rank]).sum().backward()
        close(mine.grad, weights.mean(0) if rank == size - 1 else torch.zeros(6, 2))

        rows = [r + 1 for r in range(size)]
        losses = [given(r, (sum(rows), 2), seed=5) for r in range(size)]
        mine = _leaf(given(rank, (rows[rank], 2)))
        (hvd.allgather(mine) * losses[rank]).sum().backward()
        close(mine.grad, torch.stack(losses).mean(0).split(rows)[rank])

        counts = [[(i + j) % 3 for j in range(size)] for i in range(size)]
        mine = _leaf(given(rank, (sum(counts[rank]) + 2, 2)))  # two rows are not sent
        output, received = hvd.alltoall(mine, splits=counts[rank], name="all to all")
        losses = [given(r, (sum(counts[i][r] for i in range(size)), 2), seed=6) for r in range(size)]
        (output * losses[rank]).sum().backward()
        parts = [losses[r].split([counts[i][r] for i in range(size)])[rank] for r in range(size)]
        close(mine.grad, torch.cat([*parts, torch.zeros(2, 2)]))

        for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
            mine = _leaf(given(rank, (2 * size + 1,)))
            scattered = hvd.reducescatter(mine, op=op)
            losses = [given(r, (2 + (r < 1),), seed=7) for r in range(size)]
            (scattered * losses[rank]).sum().backward()
            close(mine.grad, torch.cat(losses) * factor)

        first, second = _leaf(everyone[rank]), _leaf(everyone[rank, 0])
        one, _ = hvd.grouped_allreduce([first, second], op=hvd.Sum)
        one.sum().backward()
        close(first.grad, torch.full((6, 2), float(size)))
        close(second.grad, torch.zeros(2))

        leaf = _leaf(everyone[rank])
        with pytest.raises(NotImplementedError, match="allreduce is not differentiable with op=Min"):
            hvd.allreduce(leaf, op=hvd.Max).sum().backward()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients(ranks, size):
    ranks(size).run(gradients)
