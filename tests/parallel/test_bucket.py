"""Double-buffered memory for gradients in reduction, with buckets that small parameters share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.parallel.engine import Engine
from farandole.parallel.zero.buffer_pool import buffer_lengths


def test_a_buffer_is_as_long_as_its_longest_bucket() -> None:
    assert buffer_lengths([]) == []
    assert buffer_lengths([5]) == [5]
    assert buffer_lengths([5, 7]) == [5, 7]
    assert buffer_lengths([5, 7, 6, 2, 4]) == [6, 7]


def _gradients(rank: int, size: int, zero: int) -> list[Tensor]:
    """Return the parameters of a model with small and large layers after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise((64, 256, 8, 8, 16, 1024))))
    comm = Communicator(torch.distributed.group.WORLD)
    engine = Engine(model, comm, bucket_bytes=600, zero=zero)
    if zero:
        several = [bucket for bucket in engine.buckets if len(bucket.parameters) > 1]
        pool = several[0]._pool
        assert pool is not None
        assert 0 < pool.nbytes <= 2 * (2 * 600 + 4 * 64)  # two buckets of small parameters, with gaps
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        engine(inputs[rank::size]).square().mean().backward()
        optimizer.step()
    with engine.whole():
        found = [parameter.detach().clone() for parameter in model.parameters()]
    engine.close()
    return found


def test_training_matches_one_process(ranks: Any) -> None:
    (alone,) = ranks(1).run(_gradients, 0)
    for size in (2, 4):
        for zero in (2, 3):
            for found in ranks(size).run(_gradients, zero):
                torch.testing.assert_close(found, alone)
