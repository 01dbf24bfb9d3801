"""Gradients that are reduced in the memory in which autograd created them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farandole.comm.communicator import Communicator
from farandole.memory.tracker import DeviceMemory
from farandole.parallel.engine import Engine
from farandole.parallel.zero.buffer_pool import DEPTH
from tests.parallel.odd import loss_of

WIDTH, SHARE, STEPS = 64, 4, 3


class Turned(torch.autograd.Function):
    """The identity for a weight whose gradient is not contiguous."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Return the weight."""
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient with other strides."""
        return gradient.t().contiguous().t()


class Even(nn.Module):
    """Parameters without gaps: tied, used twice in a recomputed part, with a noncontiguous gradient, rarely or never
    used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.sometimes = nn.Linear(WIDTH, WIDTH, bias=False)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, tokens: Tensor, use: bool) -> Tensor:
        """Return logits (..., 32) of tokens; `use` specifies whether `sometimes` is used."""
        x = self.embedding(tokens)
        x = x + checkpoint(self._again, x, use_reentrant=False)
        x = self.frozen(x @ Turned.apply(self.turned))
        if use:
            x = x + self.sometimes(x)
        return F.linear(self.twice(x), self.embedding.weight)

    def _again(self, x: Tensor) -> Tensor:
        return torch.tanh(self.twice(x))


def _batches(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randint(0, 32, (SHARE * size, 6), generator=generator) for _ in range(STEPS)]


def _alone(size: int, accumulate: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Even()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in _batches(size):
        optimizer.zero_grad()
        for rank, share in enumerate(batch.split(SHARE)):
            for part in share.split(SHARE // accumulate):
                (loss_of(model, part, rank == 0) / (size * accumulate)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def _together(rank: int, size: int, zero: int, accumulate: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Even()
    comm = Communicator(dist.group.WORLD)
    engine = Engine(model, comm, bucket_bytes=1, zero=zero)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for batch in _batches(size):
        *first, last = batch.split(SHARE)[rank].split(SHARE // accumulate)
        for part in first:
            with engine.no_sync():
                (loss_of(engine, part, rank == 0) / accumulate).backward()
        (loss_of(engine, last, rank == 0) / accumulate).backward()
        engine.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    comm.barrier()
    found = {names[id(parameter)]: value.clone() for parameter, value in engine.whole_parameters()}
    engine.close()
    return found


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_training_matches_one_process(ranks: Any, size: int, zero: int, backend: str) -> None:
    for accumulate in (1, 2):
        expected = _alone(size, accumulate)
        results = ranks(size, backend).run(_together, zero, accumulate)
        for result in results:
            for name, value in result.items():
                torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}")
                assert torch.equal(value, results[0][name]), f"{name} differs between ranks"


def _alive(rank: int, size: int) -> list[int]:
    """Return the number of autograd's gradients that exist each time another gradient arrives."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12)]
    model = nn.Sequential(*layers)
    engine = Engine(model, Communicator(dist.group.WORLD), bucket_bytes=1, zero=2)
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    counts = []

    def arrives(gradient: Tensor) -> None:
        seen.append(weakref.ref(gradient.untyped_storage()))
        counts.append(sum(storage() is not None for storage in seen))

    for layer in layers:
        layer.weight.register_hook(arrives)
    engine(torch.randn(3, WIDTH)).square().mean().backward()
    assert not any(storage() is not None for storage in seen)
    engine.close()
    return counts


def _taken(rank: int, size: int, dtype: torch.dtype | None, width: int) -> tuple[int, int]:
    """Return the peak bytes of gradients and their buffers in a pass, and the bytes that a rank keeps at the end."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(24)))
    engine = Engine(model, Communicator(dist.group.WORLD), bucket_bytes=4000, zero=2, dtype=dtype)
    most = 0
    with DeviceMemory(None, torch.device("cpu")) as memory:

        def arrives(gradient: Tensor) -> None:
            nonlocal most
            most = max(most, memory.in_use["gradients"])

        for parameter in model.parameters():
            parameter.register_hook(arrives)
        engine(torch.randn(3, width)).square().mean().backward()
        kept = memory.in_use["gradients"]
    engine.close()
    return most, kept


@pytest.mark.parametrize(("dtype", "width"), [(None, 64), (None, 63), (torch.bfloat16, 64)])
def test_the_number_of_buffers_is_small(ranks: Any, dtype: torch.dtype | None, width: int) -> None:
    """The number is small although the biases of many layers share a bucket, whose reduction starts late."""
    for most, kept in ranks(2).run(_taken, dtype, width):
        assert most - kept <= DEPTH * 4 * (width + 1) ** 2


@pytest.mark.parametrize("size", [1, 2])
def test_few_gradients_are_kept_at_a_time(ranks: Any, size: int) -> None:
    for counts in ranks(size).run(_alive):
        assert len(counts) == 12
        assert max(counts) == DEPTH + 1  # kept until they are reduced, and the one that arrives
