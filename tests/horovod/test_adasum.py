"""Compare Adasum with its formula in float64."""

from __future__ import annotations

import pytest
import torch

import farandole.horovod.torch as hvd
from tests.horovod.jobs import close, given, session


def formula(vectors):
    """Combine vectors recursively in pairs (arXiv:2006.02924)."""
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = formula(vectors[:half]), formula(vectors[half:])
    dot = (a * b).sum()
    one = 1 - dot / (2 * (a * a).sum()) if a.any() else 1.0
    other = 1 - dot / (2 * (b * b).sum()) if b.any() else 1.0
    return one * a + other * b


def expected(size, shape, seed=0):
    return formula([given(rank, shape, torch.float64, seed) for rank in range(size)])


def reductions(rank, size):
    with session():
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            result = hvd.allreduce(given(rank, (5, 3), torch.float64).to(dtype), op=hvd.Adasum)
            torch.testing.assert_close(result.double(), expected(size, (5, 3)), rtol=0.05, atol=0.05)
        result = hvd.allreduce(given(rank, (5, 3), torch.float64), op=hvd.Adasum)
        close(result, expected(size, (5, 3)))
        close(hvd.broadcast(result, 0), result)  # the same bits on all ranks
        shapes = [(7,), (2, 2), ()]
        tensors = [given(rank, shape, torch.float64, i) for i, shape in enumerate(shapes)]
        for i, one in enumerate(
            hvd.grouped_allreduce(tensors, op=hvd.Adasum)
        ):  # each with its own coefficients
            close(one, expected(size, shapes[i], i))
        equal = torch.tensor([1.0, 2.0])
        close(hvd.allreduce(equal, op=hvd.Adasum), equal)
        orthogonal = torch.eye(size)[rank]
        close(hvd.allreduce(orthogonal, op=hvd.Adasum), torch.ones(size))
        close(hvd.allreduce(torch.zeros(3) + (rank == 0), op=hvd.Adasum), torch.ones(3))
        with pytest.raises(ValueError, match="floating-point"):
            hvd.allreduce(torch.ones(2, dtype=torch.int64), op=hvd.Adasum)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_adasum(ranks, size):
    ranks(size).run(reductions)


def test_adasum_through_gloo(ranks):
    ranks(2, "gloo").run(reductions)


def three_ranks(rank, size):
    with session(), pytest.raises(ValueError, match="Adasum with 3 ranks .* power of 2"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)


def test_adasum_refuses_three_ranks(ranks):
    ranks(3).run(three_ranks)


def optimizer(rank, size):
    """Compare with the formula, applied per parameter to each rank's change by momentum SGD."""
    with session():
        start = [given(0, (3, 2), torch.float64, 9), given(0, (4,), torch.float64, 10)]
        mine = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        plain = torch.optim.SGD(mine, lr=0.1, momentum=0.9)
        distributed = hvd.DistributedOptimizer(plain, [("a", mine[0]), ("b", mine[1])], op=hvd.Adasum)
        assert isinstance(distributed, torch.optim.SGD)
        reference = [tensor.clone() for tensor in start]
        momenta = [[torch.zeros_like(tensor) for tensor in start] for _ in range(size)]
        for step in range(3):
            distributed.zero_grad()
            for i, parameter in enumerate(mine):
                parameter.grad = given(rank, tuple(parameter.shape), torch.float64, 20 + 2 * step + i)
            distributed.synchronize()
            distributed.step()
            for i, value in enumerate(reference):
                changes = []
                for r in range(size):
                    gradient = given(r, tuple(value.shape), torch.float64, 20 + 2 * step + i)
                    momenta[r][i] = 0.9 * momenta[r][i] + gradient
                    changes.append(-0.1 * momenta[r][i])
                value += formula(changes)
                close(mine[i].detach(), value)
        with pytest.raises(AssertionError, match="Skipping synchronization is not supported"):
            distributed.skip_synchronize()


@pytest.mark.parametrize("size", [2, 4])
def test_adasum_optimizer(ranks, size):
    ranks(size).run(optimizer)
