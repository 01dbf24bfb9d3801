"""Slots for gradients on their way: neighbours take turns, and two long buckets share one slot."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.parallel.data import DataParallel
from farandole.parallel.lender import slot_lengths, slots_for


@pytest.mark.parametrize(
    ("lengths", "slots"),
    [
        ([], []),
        ([5], [0]),
        ([5, 5, 5], [0, 1, 0]),
        ([60, 40, 40, 40, 60], [0, 1, 0, 1, 0]),  # the long ones share a slot already
        ([60, 40, 39, 40, 60, 1], [0, 1, 0, 1, 0, 1]),
        ([60, 40, 39, 38, 40, 60], [0, 1, 0, 1, 1, 0]),  # one waits for the shortest
        ([41, 40, 40, 40, 40, 41], [0, 1, 0, 1, 0, 1]),  # hardly anything to gain
    ],
)
def test_turns(lengths: list[int], slots: list[int]) -> None:
    assert slots_for(lengths) == slots


def test_every_bucket_fits_into_its_slot_and_at_most_one_waits() -> None:
    chance = random.Random(0)
    for _ in range(200):
        lengths = [chance.randrange(1, 1000) for _ in range(chance.randrange(2, 30))]
        slots = slots_for(lengths)
        room = slot_lengths(lengths, slots)
        assert all(length <= room[slot] for length, slot in zip(lengths, slots, strict=True))
        assert sum(one == other for one, other in pairwise(slots)) <= 1
        assert sum(room) <= max(lengths[0::2]) + max(lengths[1::2])


def test_many_buckets_take_no_time() -> None:
    """A model of 10 billion parameters has so many."""
    lengths = [50] + [10] * 9998 + [50]
    started = time.process_time()
    assert sum(slot_lengths(lengths, slots_for(lengths))) == 60
    assert time.process_time() - started < 1


def _gradients(rank: int, size: int, zero: int) -> list[Tensor]:
    """Gradients of a model with long ends, of the second of two steps, whole."""
    torch.manual_seed(0)
    widths = (63, 257, 9, 7, 15, 1023)  # their products leave gaps: nothing is adopted
    model = nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(widths)))
    comm = Communicator(torch.distributed.group.WORLD)
    engine = DataParallel(model, comm, bucket_bytes=1, zero=zero)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if zero:
        lender = engine.buckets[0].gradients._loan.lender
        assert not any(lender.adopts)
        assert 4 * 257 * 63 <= lender.nbytes < 4 * (15 * 1023 + 257 * 63)
    for step in range(2):
        optimizer.zero_grad()
        inputs = torch.randn(4, 63, generator=torch.Generator().manual_seed(step))
        engine(inputs[rank::size]).square().mean().backward()
        optimizer.step()
    with engine.whole():
        found = [parameter.detach().clone() for parameter in model.parameters()]
    engine.close()
    return found


def test_what_is_learned_is_that_of_one_process(ranks: Any) -> None:
    (alone,) = ranks(1).run(_gradients, 0)
    for size in (2, 4):
        for zero in (2, 3):
            for found in ranks(size).run(_gradients, zero):
                torch.testing.assert_close(found, alone)
