"""DistributedDataParallel over the backend: the gradients of Gloo, or of one process with all the data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - the usual name

from tests.comm.next_to_gloo import gloo_group

WIDTH = 96


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def batch(rank: int, step: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(
    group: dist.ProcessGroup, prepare: Callable[[DDP], None] | None = None, steps: int = 3, **options
) -> list:
    """Return the weights after some steps of SGD."""
    parallel = DDP(make_model(), process_group=group, bucket_cap_mb=0.05, **options)
    if prepare is not None:
        prepare(parallel)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        parallel(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in parallel.parameters()]


def train_alone(size: int, steps: int = 3) -> list:
    """Return the weights after the same steps in one process, on the batches of all ranks."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.cat([batch(rank, step) for rank in range(size)])).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def close(found: list, expected: list, **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


def powersgd(state: dict) -> Callable[[DDP], None]:
    def prepare(parallel: DDP) -> None:
        hook_state = powerSGD_hook.PowerSGDState(
            parallel.process_group,
            matrix_approximation_rank=2,
            start_powerSGD_iter=2,
            min_compression_rate=1,
            **state,
        )
        parallel.register_comm_hook(hook_state, powerSGD_hook.powerSGD_hook)

    return prepare


def register(hook: Callable) -> Callable[[DDP], None]:
    return lambda parallel: parallel.register_comm_hook(parallel.process_group, hook)


def check_variants(rank: int, size: int) -> None:
    alone = train_alone(size)
    close(train(dist.group.WORLD), alone)
    close(train(dist.group.WORLD, gradient_as_bucket_view=True), alone)
    close(train(dist.group.WORLD, static_graph=True), alone)
    close(train(dist.group.WORLD, find_unused_parameters=True), alone)
    close(train(dist.group.WORLD, register(default_hooks.allreduce_hook)), alone)
    gloo = gloo_group()
    for prepare in (
        register(default_hooks.fp16_compress_hook),
        register(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    ):
        close(train(dist.group.WORLD, prepare), train(gloo, prepare), rtol=1e-3, atol=1e-4)
        close(train(dist.group.WORLD, prepare), alone, rtol=1e-2, atol=1e-3)


def check_powersgd(rank: int, size: int) -> None:
    """Several buckets, whose callbacks communicate: their order must be the same on all ranks."""
    for turn in range(2 if size == 2 else 1):
        weights = train(dist.group.WORLD, powersgd({"random_seed": turn}), steps=6)
        gathered: list = [None] * size
        dist.all_gather_object(gathered, weights)
        for other in gathered:
            close(other, weights, rtol=0, atol=0)
    # a full-rank approximation of one bucket is the plain average
    exact = train(dist.group.WORLD, powersgd({"use_error_feedback": False, "warm_start": False}), steps=2)
    close(exact, train_alone(size, steps=2))


def check_no_sync(rank: int, size: int) -> None:
    parallel = DDP(make_model(), bucket_cap_mb=0.05)
    with parallel.no_sync():
        parallel(batch(rank, 0)).square().mean().backward()
    parallel(batch(rank, 1)).square().mean().backward()
    model = make_model()
    for step in (0, 1):
        model(torch.cat([batch(r, step) for r in range(size)])).square().mean().backward()
    close([p.grad for p in parallel.parameters()], [p.grad for p in model.parameters()])


class Branches(nn.Module):
    """Uses one of two branches; each rank uses a different branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](x)


def check_unused_parameters(rank: int, size: int) -> None:
    model = DDP(Branches(), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        model(torch.ones(2, 4), (rank + step) % 2).sum().backward()
        users = [r for r in range(size) if (r + step) % 2 == 0]
        expected = 2.0 * len(users) / size
        assert torch.allclose(model.module.branches[0].bias.grad, torch.full((4,), expected))


def check_join(rank: int, size: int) -> None:
    """Ranks with fewer batches finish earlier."""
    gloo = gloo_group()
    results = []
    for group in (dist.group.WORLD, gloo):
        parallel = DDP(make_model(), process_group=group, bucket_cap_mb=0.05)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        with Join([parallel]):
            for step in range(3 + 2 * rank):
                optimizer.zero_grad()
                parallel(batch(rank, step)).square().mean().backward()
                optimizer.step()
        results.append([p.detach().clone() for p in parallel.parameters()])
    close(*results)


def check_sparse_gradients(rank: int, size: int) -> None:
    torch.manual_seed(0)
    table = DDP(nn.Embedding(20, 5, sparse=True))
    words = torch.tensor([rank, 3, 7])
    table(words).square().sum().backward()
    grad = table.module.weight.grad
    assert grad.is_sparse
    torch.manual_seed(0)
    alone = nn.Embedding(20, 5)
    loss = sum(alone(torch.tensor([r, 3, 7])).square().sum() for r in range(size)) / size
    loss.backward()
    torch.testing.assert_close(grad.to_dense(), alone.weight.grad)


def make_wide_model() -> nn.Sequential:
    """Return a model with several buckets of 1 MiB, the smallest bucket size for which DDP can be compiled."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(WIDTH, 3000), nn.Tanh(), nn.Linear(3000, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    )


def check_compiled(rank: int, size: int, options: dict[str, bool]) -> None:
    """Dynamo intercepts the Python frames that DDP's reducer calls while a compiled model runs."""
    torch._dynamo.reset()
    alone = make_wide_model()
    compiled = torch.compile(DDP(make_wide_model(), bucket_cap_mb=1, **options), backend="aot_eager")
    for step in range(4):
        for model, inputs in (
            (compiled, batch(rank, step)),
            (alone, torch.cat([batch(r, step) for r in range(size)])),
        ):
            model.zero_grad()
            model(inputs).square().mean().backward()
        close([p.grad for p in compiled.parameters()], [p.grad for p in alone.parameters()])


def check_zero(rank: int, size: int) -> None:
    parallel = DDP(make_model(), bucket_cap_mb=0.05)
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(batch(rank, step)).square().mean().backward()
        optimizer.step()
    close([p.detach() for p in parallel.parameters()], train_alone(size))


def check_buffers(rank: int, size: int) -> None:
    """Batch statistics are broadcast from rank 0 before each forward pass."""
    torch.manual_seed(rank)  # DDP gives all ranks the weights of rank 0
    model = DDP(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last))
    for _ in range(2):
        inputs = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        F.mse_loss(model(inputs), torch.zeros(2, 4, 4, 4)).backward()
    gathered: list = [None] * size
    dist.all_gather_object(gathered, [p.grad for p in model.parameters()])
    for other in gathered:
        close(other, gathered[0], rtol=0, atol=0)


@pytest.mark.parametrize("check", [check_variants, check_powersgd, check_join])
@pytest.mark.parametrize("size", [2, 4])
def test_ddp(ranks, size, check):
    ranks(size).run(check)


@pytest.mark.parametrize(
    "check", [check_no_sync, check_unused_parameters, check_sparse_gradients, check_zero, check_buffers]
)
def test_ddp_on_two_ranks(ranks, check):
    ranks(2).run(check)


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=lambda options: "".join(options),
)
def test_compiled_ddp(ranks, options):
    ranks(2).run(check_compiled, options, timeout_s=180)
