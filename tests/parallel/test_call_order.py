"""Ranks that compute different blocks gather the same weights in the same order, and get the gradients of one
process."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole
from farandole import Plan
from farandole.comm.communicator import Communicator
from farandole.memory.tracker import DeviceMemory
from farandole.parallel.bucket import Bucket
from farandole.parallel.zero.call_order import CallOrder

GATHERS, ITEMS, PASSES = 5, 8, 12


def _random_passes(rank: int, size: int, seed: int) -> list[list[int]]:
    """Return the items that each pass has launched."""
    assert torch.distributed.group.WORLD is not None
    common, own = random.Random(seed), random.Random(100 * seed + rank)
    launched: list[int] = []
    passes = []
    order = CallOrder(Communicator(torch.distributed.group.WORLD), launched.append, GATHERS)
    for number in range(PASSES):
        like_others = common.random() < 0.5
        chance = common if like_others else own
        wanted = chance.choices(range(ITEMS), k=chance.randrange(10))
        left = chance.sample(range(GATHERS, ITEMS), chance.randrange(3))
        order.begin("forward" if number % 3 else "backward")
        for item in wanted:
            before = len(launched)
            order.advance(_by_chance(chance))
            order.request(item)
            assert item in launched[before:]
        before = len(launched)
        order.end(partial(list, left))
        assert set(left) <= set(launched[before:])
        passes.append(launched.copy())
        launched.clear()
    return passes


def _by_chance(chance: random.Random) -> Callable[[int], bool]:
    return lambda item: item % 2 == chance.randrange(2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_makes_the_same_calls(ranks: Any, size: int) -> None:
    for seed in range(6):
        found = ranks(size).run(_random_passes, seed)
        assert all(each == found[0] for each in found)


def _agreed(rank: int, size: int) -> list[list[int]]:
    assert torch.distributed.group.WORLD is not None
    launched: list[int] = []
    order = CallOrder(Communicator(torch.distributed.group.WORLD), launched.append, GATHERS)
    found = []
    for _ in range(2):
        order.begin("backward")
        for item in (2, 7, 1, 6, 0, 5):  # each block is gathered, then its gradients are reduced
            if item not in launched:
                order.request(item)
        order.end()
        found.append(launched.copy())
        launched.clear()
    return found


def test_blocks_are_gathered_ahead(ranks: Any) -> None:
    for negotiated, ahead in ranks(2).run(_agreed):
        assert negotiated == [2, 7, 1, 6, 0, 5]
        assert ahead == [2, 1, 7, 0, 6, 5]


class Optional(nn.Module):
    """A model with a tied embedding; each call specifies which blocks are computed, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(6)
        )

    def forward(self, tokens: Tensor, blocks: list[int]) -> Tensor:
        """Return logits (..., 12)."""
        x = self.embedding(tokens)
        for number in blocks:
            x = x + self.blocks[number](x)
        return F.linear(x, self.embedding.weight)


def _choices(step: int, rank: int) -> list[int]:
    """Return the blocks of a step: rank 1 skips, repeats or reorders blocks, and rank 0 does so in the last steps."""
    every = list(range(6))
    odd = [[0, 2, 5], [0, 1], [3, 3, 1], [], [5, 4, 3, 2, 1, 0], every]
    return odd[(step + rank) % 6] if rank % 2 or step > 4 else every


def _tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 12, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _train(rank: int, size: int, recompute: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Optional().double()  # rounding errors add up in fp32
    engine = farandole.parallelize(model, Plan(zero=3, recompute=recompute))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.3))
    for step in range(9):
        tokens = _tokens(step, rank)
        _loss(engine(tokens, _choices(step, rank)), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 1:
            with torch.no_grad():
                engine(tokens, _choices(step + 1, rank))
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_may_compute_different_blocks(ranks: Any, size: int, recompute: str) -> None:
    torch.manual_seed(0)
    model = Optional().double()  # rounding errors add up in fp32
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for step in range(9):
        for rank in range(size):
            tokens = _tokens(step, rank)
            (_loss(model(tokens, _choices(step, rank)), tokens) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in ranks(size, "gloo").run(_train, recompute):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=f"{name} of {size} ranks")


def _calls_of_steps(rank: int, size: int) -> list[tuple[int, int]]:
    """Return the rounds of negotiation and the reductions in each step, for a model that all ranks compute alike."""
    counts = [0, 0]

    def counted(place: int, function: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[place] += 1
            return function(*args)

        return call

    with (
        mock.patch.object(CallOrder, "_negotiate", counted(0, CallOrder._negotiate)),
        mock.patch.object(Bucket, "reduce_async", counted(1, Bucket.reduce_async)),
    ):
        model = Optional()
        engine = farandole.parallelize(model, Plan(zero=3))
        optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.3))
        found = []
        for step in range(4):
            counts[:] = [0, 0]
            tokens = _tokens(step, rank)
            _loss(engine(tokens, list(range(6))), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((counts[0], counts[1] - len(engine.buckets)))
    engine.close()
    return found


def test_ranks_negotiate_in_the_first_step_only(ranks: Any) -> None:
    for first, *others in ranks(2, "gloo").run(_calls_of_steps):
        assert first[0] > 10
        assert others == [(2, 0)] * 3  # the end of each pass; every bucket is reduced once


def _activations(rank: int, size: int, recompute: Any) -> int:
    """Return the bytes of activations after the forward pass."""
    with DeviceMemory(None, torch.device("cpu")) as memory:
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(8))
        )
        engine = farandole.parallelize(model, Plan(zero=3, recompute=recompute))
        before = memory.in_use["activations"]
        loss = engine(torch.randn(256, 32)).square().mean()
        found = memory.in_use["activations"] - before
        loss.backward()
    engine.close()
    return found


def test_blocks_with_gathered_weights_are_recomputed(ranks: Any) -> None:
    for backend in ("farandole", "gloo"):
        (everything, _), (few, _) = (ranks(2, backend).run(_activations, way) for way in ("none", "block"))
        assert few < 0.3 * everything, backend
