"""Training with compressed gradients: nearly the same loss, the given number of threads, and gradients of any size."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import Cast, Compression, Int8, PowerSGD, TopK
from farandole.parallel.engine import Engine
from tests.comm.hosts import hierarchical_group

STEPS, SAMPLES = 150, 32


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def losses(rank: int, size: int, compressions: list[Compression | None]) -> list[float]:
    """Return the test loss of a student network that learns from another network, for each compression."""
    group = hierarchical_group([0, 1], rank)
    comm = Communicator(group)
    teacher, test = network(1), torch.randn(2000, 20, generator=torch.Generator().manual_seed(2))
    found = []
    for compression in compressions:
        student = network(3)
        replica = Engine(student, comm, bucket_bytes=10_000, compression=compression)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(10 + rank)
        for _ in range(STEPS):
            samples = torch.randn(SAMPLES, 20, generator=generator)
            replica.zero_grad()
            nn.functional.mse_loss(student(samples), teacher(samples).detach()).backward()
            replica.synchronize()
            optimizer.step()
        with torch.no_grad():
            found.append(nn.functional.mse_loss(student(test), teacher(test)).item())
        weights = nn.utils.parameters_to_vector(student.parameters()).detach()
        both = [torch.empty_like(weights) for _ in range(size)]
        dist.all_gather(both, weights, group=group)
        assert torch.equal(*both)
        replica.close()
    dist.destroy_process_group(group)
    return found


def test_learns_nearly_as_well_with_error_feedback(ranks):
    plain, bf16, int8, powersgd, topk, forgetful = ranks(2).run(
        losses,
        [None, Cast(), Int8(), PowerSGD(2), TopK(0.03), TopK(0.03, error_feedback=False)],
    )[0]
    assert bf16 == pytest.approx(plain, rel=0.02)
    assert int8 == pytest.approx(plain, rel=0.02)
    assert powersgd < 1.15 * plain
    assert topk < 1.3 * plain
    assert forgetful > 1.3 * topk


def threads_outside_python() -> int:
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def added_threads(rank: int, size: int) -> int:
    """Return the number of threads outside of Python that compressed reductions start."""
    group = hierarchical_group([0, 1], rank)
    model = network(1)
    replica = Engine(model, Communicator(group), compression=PowerSGD(2))
    before = threads_outside_python()
    for _ in range(3):
        replica.zero_grad()
        model(torch.ones(3, 20)).sum().backward()
        replica.synchronize()
    after = threads_outside_python()
    replica.close()
    dist.destroy_process_group(group)
    return after - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reductions_use_the_given_number_of_threads(ranks):
    """The ranks of these tests use one thread."""
    assert ranks(2).run(added_threads) == [0, 0]


class Sometimes(nn.Module):
    """A layer that only some calls use, a layer that is never used, and large gradients next to small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_first, self.never = (nn.Linear(40, 40) for _ in range(3))

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return self.always(x * 1e4) + (self.at_first(x) * 1e-6 if first else 0)


def detect_gradients(rank: int, size: int) -> None:
    group = hierarchical_group([0, 0, 1, 1], rank)
    for compression in (Int8(), TopK(0.001), PowerSGD(1)):
        torch.manual_seed(rank)
        model = Sometimes()
        replica = Engine(model, Communicator(group), compression=compression)
        for _ in range(2):
            replica.zero_grad()
            model(torch.ones(3, 40), rank == 0).sum().backward()
            replica.synchronize()
            assert model.always.weight.grad is not None
            assert model.at_first.weight.grad is not None
            assert model.never.weight.grad is None
        again = Engine(Sometimes(), Communicator(group), compression=compression)
        again.load_compression(replica.compression_state())
        assert again.compression_state().keys() == replica.compression_state().keys()
        again.rescale(2)
        for name, value in again.compression_state().items():
            factor = 2 if "residual" in name else 1
            assert torch.equal(value, replica.compression_state()[name] * factor)
    with pytest.raises(TypeError, match=r"compression='int8': expected a Compression \(Cast, Int8"):
        Engine(nn.Linear(2, 2), Communicator(group), compression="int8")
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        Engine(nn.Linear(2, 2).double(), Communicator(group), compression=Int8())
    dist.destroy_process_group(group)


def test_gradients_of_any_size_are_detected(ranks):
    ranks(4).run(detect_gradients)
