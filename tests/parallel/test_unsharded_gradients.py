"""Test how many unsharded gradients a rank holds with `zero` 2 and 3, and that reductions start during the backward
pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.parallel.bucket import Bucket
from farandole.parallel.engine import Engine
from farandole.parallel.zero.sharding import box_mesh, plan_sharding, replicated_layouts
from farandole.planner.memory import _pools, whole_bytes

WIDTH, BLOCKS, STEPS = 64, 8, 3

BACKENDS = {"shared": "farandole", "gathered": "gloo"}


class Blocks(nn.Sequential):
    """A model whose blocks have two layers each."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
        )


class Tied(nn.Module):
    """A model whose first and last layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * WIDTH, WIDTH)
        self.blocks = Blocks()
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        embedded = x @ self.embedding.weight[:WIDTH]
        return self.head(self.blocks(embedded))


class Unused(nn.Module):
    """A model with a layer that is never used; the backward pass would complete it first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class PartlyUsed(nn.Module):
    """A model in which every block has a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks()
        for block in self.blocks:
            block.register_parameter("unused", nn.Parameter(torch.ones(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Reversed(nn.Module):
    """A model that uses its blocks in the reverse order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks()

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Sparse(nn.Module):
    """A model that uses different blocks on each rank and in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks()
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if (number + self.chosen) % 3:
                x = block(x)
        return x


def _batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _choose(model: nn.Module, step: int, rank: int) -> None:
    if isinstance(model, Sparse):
        model.chosen = step + rank


def _alone(make: type[nn.Module], size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            _choose(model, step, rank)
            (model(_batch(step)[rank::size]).square().mean() / size).backward()
        optimizer.step()
    return dict(model.named_parameters())


class Counters:
    """Counts reductions and the bytes of unsharded gradients in the buckets of `engine`, including unused buffers."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = self.launched = 0
        self._buckets = engine.buckets
        use, reduce_async = Bucket._use, Bucket.reduce_async

        def counted_use(bucket: Bucket, buffer: Tensor) -> Tensor:
            found = use(bucket, buffer)
            self.peak = max(self.peak, self.held())
            return found

        def counted_reduce(bucket: Bucket) -> None:
            self.launched += 1
            reduce_async(bucket)

        monkeypatch.setattr(Bucket, "_use", counted_use)
        monkeypatch.setattr(Bucket, "reduce_async", counted_reduce)

    def held(self) -> int:
        pools = {id(bucket._pool): bucket._pool for bucket in self._buckets}
        buffers = [buffer for pool in pools.values() if pool is not None for buffer in pool._buffers]
        buffers += [bucket._buffer for bucket in self._buckets if bucket._buffer is not None]
        return sum(
            {
                buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers
            }.values()
        )


@dataclass(frozen=True)
class Measured:
    """The peak share of unsharded gradients in a step, and the reductions during and after the backward pass."""

    peak: float
    during: int
    after: int


def _train(
    rank: int, size: int, make: type[nn.Module], zero: int, bucket_bytes: int
) -> tuple[dict[str, Tensor], list[Measured], float, int]:
    """Return the weights, a measurement of each step, the planner's estimate of the peak, and the number of buckets."""
    torch.manual_seed(0)
    model = make().double()
    comm = Communicator(torch.distributed.group.WORLD)
    plan = plan_sharding(
        model,
        box_mesh(size),
        replicated_layouts(model),
        rank,
        zero=zero,
        gathered=zero == 3 and not comm.shares_memory(),
        bucket_bytes=bucket_bytes,
    )
    total = sum(map(whole_bytes, plan.trained))
    estimate = _pools(model, plan) / total
    engine = Engine(model, comm, bucket_bytes, zero=zero)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    steps = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        counters = Counters(engine, monkeypatch)
        in_backward = 0

        def end_pass(*, last: bool) -> None:
            nonlocal in_backward
            in_backward = counters.launched
            plain(last=last)

        plain = engine._reducer.end_pass
        monkeypatch.setattr(engine._reducer, "end_pass", end_pass)
        for step in range(STEPS):
            optimizer.zero_grad()
            counters.peak, counters.launched = counters.held(), 0
            _choose(model, step, rank)
            engine(_batch(step)[rank::size]).square().mean().backward()
            optimizer.step()
            steps.append(Measured(counters.peak / total, in_backward, counters.launched - in_backward))
    names = {parameter: name for name, parameter in model.named_parameters()}
    weights = {names[p]: value.detach().clone() for p, value in engine.whole_parameters()}
    count = len(engine.buckets)
    engine.close()
    return weights, steps, estimate, count


LAYER_BYTES = 8 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("make", [Blocks, Tied, Unused, PartlyUsed, Reversed, Sparse])
@pytest.mark.parametrize("weights", BACKENDS)
def test_few_unsharded_gradients_are_held(ranks: Any, make: type[nn.Module], zero: int, weights: str) -> None:
    alone = _alone(make, 2)
    for bucket_bytes in (1000, LAYER_BYTES - 100, 2 * LAYER_BYTES - 200):
        results = ranks(2, BACKENDS[weights]).run(_train, make, zero, bucket_bytes)
        for found, steps, estimate, buckets in results:
            for name, value in alone.items():
                torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}")
            if make is Sparse:  # the ranks' gradients arrive in different orders
                continue
            largest = 2 / (2 * BLOCKS)  # a part of all gradients: the layers of a block
            first, *later = steps
            assert first.peak < 0.76
            for step in later:
                assert step.peak <= estimate + largest
                assert step.during >= buckets - (make is Unused)
                assert step.during + step.after == buckets
            assert first.during > 0
