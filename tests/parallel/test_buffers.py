"""Test that buffers, such as BatchNorm statistics, continue with the mean of their replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.layout import Layout, Part, Shard
from farandole.mesh import Mesh
from farandole.parallel.engine import Engine
from farandole.parallel.zero.sharding import replicated_layouts

ROWS = 6


class Counting(nn.Module):
    """Adds `step` to its buffers: `whole`, and this rank's part of `split`."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inner = nn.Module()
        self.inner.register_buffer("untouched", torch.full((2,), 0.1))
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("split", torch.zeros(rows, 2))
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))
        self.step = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(self.step)
        self.split.add_(self.step)
        self.number.add_(1)
        output: Tensor = self.layer(x)
        return output


def _buffers(rank: int, size: int, sizes: dict[str, int], zero: int) -> dict[str, Tensor]:
    mesh = Mesh.box(size, factors=None, **sizes)
    cell = mesh.of_rank(rank)[0]
    split = Layout("split", (ROWS, 2), shards=tuple((axis, Shard(0)) for axis in sizes if axis == "tensor"))
    ((start, end), _) = split.boxes(mesh, cell)[0]
    model = Counting(end - start)
    layouts = {**replicated_layouts(model), "split": split}
    engine = Engine(model, Communicator(torch.distributed.group.WORLD), zero=zero, mesh=mesh, layouts=layouts)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        model.step = float(rank + 10 * step)
        engine(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    engine.close()
    return found


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 4},
        {"data": 2, "tensor": 2},
        {"context": 2, "tensor": 2},
        {"tensor": 4},
        {"expert": 2, "data": 2},
    ],
)
def test_a_buffer_is_the_mean_of_its_replicas(ranks: Any, sizes: dict[str, int], zero: int) -> None:
    mesh = Mesh.box(4, factors=None, **sizes)
    for rank, found in enumerate(ranks(4).run(_buffers, sizes, zero)):
        cell = mesh.of_rank(rank)[0]
        alike = [
            each.rank for each in mesh.cells if each.tensor == cell.tensor
        ]  # ranks with the same part of `split`
        total = sum(range(4)) / 4 + 10 + sum(range(4)) / 4
        torch.testing.assert_close(found["whole"], torch.full((4,), total))
        total = 2 * sum(alike) / len(alike) + 10
        torch.testing.assert_close(found["split"], torch.full_like(found["split"], total))
        assert found["number"] == 2
        assert found["inner.untouched"].tolist() == torch.full((2,), 0.1).tolist()


def _statistics(rank: int, size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    engine = Engine(model, Communicator(torch.distributed.group.WORLD), zero=1)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    engine(_samples(rank)).square().mean().backward()
    optimizer.step()
    norm = model[1]
    engine.close()
    return norm.running_mean.clone(), norm.running_var.clone()


def _samples(rank: int) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(rank))


def test_batch_norm_continues_with_the_mean_of_all_statistics(ranks: Any) -> None:
    expected = []
    for rank in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        model(_samples(rank))
        expected.append(torch.stack([model[1].running_mean, model[1].running_var]))
    for found in ranks(2).run(_statistics):
        torch.testing.assert_close(torch.stack(found), sum(expected) / 2)


class Caching(nn.Module):
    """Has buffers that the forward pass creates or extends to the number of samples, and one of constant shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("constant", torch.zeros(2))
        self.register_buffer("unset", None)
        self.register_buffer("longer", torch.ones(1))
        self.register_buffer("replaced", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "created"):
            self.register_buffer("created", torch.ones(len(x)))
        self.unset = self.longer = torch.ones(len(x))
        self.replaced = torch.ones(3) * len(x)
        self.constant.add_(len(x))
        output: Tensor = self.layer(x) * self.unset[:, None]
        return output


def _cached(rank: int, size: int, zero: int) -> dict[str, Tensor]:
    model = Caching()
    engine = Engine(model, Communicator(torch.distributed.group.WORLD), zero=zero)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        # on rank 0, `longer` keeps its shape
        engine(torch.ones(1 + 2 * rank, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_buffers_that_a_step_creates_or_resizes_are_not_averaged(ranks: Any, zero: int) -> None:
    for rank, found in enumerate(ranks(2).run(_cached, zero)):
        assert found["constant"].tolist() == [4.0, 4.0]
        assert found["replaced"].tolist() == [2.0, 2.0, 2.0]
        for name in ("unset", "longer", "created"):
            assert found[name].tolist() == [1.0] * (1 + 2 * rank), name


def _several_parts(rank: int, size: int) -> None:
    mesh = Mesh.box(size, factors=None, tensor=size)
    split = Layout(
        "split", (ROWS, 2), shards=(("tensor", Shard(0, (Part(2, copies=2), Part(4)))),)
    )  # each rank has its own part of the last rows, but all ranks have the first rows
    model = Counting(4)
    with pytest.raises(ValueError, match=r"split: the gradients of the parts that rank \d stores"):
        Engine(
            model,
            Communicator(torch.distributed.group.WORLD),
            mesh=mesh,
            layouts={**replicated_layouts(model), "split": split},
        )


def test_a_buffer_with_several_replica_sets_is_refused(ranks: Any) -> None:
    ranks(2).run(_several_parts)
