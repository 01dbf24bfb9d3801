"""Training through parameter servers: the parameters of one process in sync mode, and bounds in async mode."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.parallel.parameter_server import ParameterServer
from tests.parallel.odd import SHARE, Odd, loss_of, world

STEPS = 5


def values_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}


def batches_of(workers: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(11, (workers * SHARE, 6), generator=generator) for _ in range(STEPS)]


def model_of(seed: int, width: int, dtype: torch.dtype) -> Odd:
    torch.manual_seed(seed)
    model = Odd(width).to(dtype)
    model.hidden.bias.data.fill_(0.25)  # servers have neither frozen parameters
    model.offset.fill_(0.25)  # nor buffers
    return model


def train_alone(workers: int, optimizer: str, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Train in one process on the concatenated batches, from the weights of the first worker."""
    model = model_of(1, width, dtype)
    steps = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    for step, batch in enumerate(batches_of(workers)):
        steps.zero_grad()
        loss_of(model, batch, use=step % 2 == 1).backward()
        steps.step()
    return values_of(model)


def train_served(
    rank: int, size: int, servers: int, optimizer: str, width: int, dtype: torch.dtype, shares: list[int]
) -> Any:
    with ParameterServer(world(), servers, timeout_s=20) as roles:
        for _ in range(2):
            model = model_of(
                rank + 1 - servers, width, dtype
            )  # ranks differ; the first worker's weights are used
            with roles.session(model, optimizer=OPTIMIZERS[optimizer]) as session:
                if session.is_worker:
                    assert session.worker is not None
                    for step, batch in enumerate(batches_of(session.workers)):
                        session.pull()
                        assert session.version == step
                        mine = batch.split(shares)[session.worker]
                        loss_of(model, mine, use=step % 2 == 1).backward()
                        session.push(weight=len(mine))
        return values_of(model) if session.is_worker else session.report


@pytest.mark.parametrize(
    ("servers", "shares", "optimizer", "width"),
    [
        (1, [4], "sgd", 7),
        (1, [4, 4], "sgd", 7),
        (1, [4, 4, 4], "sgd", 7),
        (1, [1, 7], "sgd", 7),
        (2, [4, 4], "sgd", 7),
        (2, [4, 4], "adamw", 300),  # wide enough for tensors to be split
        (3, [4], "sgd", 300),
    ],
)
def test_sync_gives_the_parameters_of_one_process(ranks, servers, shares, optimizer, width):
    # Training with a width of 300 diverges, and Adam magnifies small gradients: both magnify fp32 rounding errors.
    dtype = torch.float32 if width == 7 else torch.float64
    workers = len(shares)
    expected = train_alone(workers, optimizer, width, dtype)
    results = ranks(servers + workers).run(train_served, servers, optimizer, width, dtype, shares)
    for report in results[:servers]:
        assert report.updates == STEPS and set(report.pushes.values()) == {STEPS}
        assert report.most_lead == 0 and not report.lost and set(report.staleness) == {0}
    for values in results[servers:]:
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
        for value, first in zip(values, results[servers], strict=True):
            assert torch.equal(value, first)


TURNS, SLOW_S = 12, 0.02


def race(rank: int, size: int, servers: int, staleness: int | None) -> Any:
    """Return the start of each turn and of its push, on the clock that all ranks share; the last rank is slow."""
    model = nn.Linear(1, 1, bias=False)
    with ParameterServer(world(), servers, timeout_s=20) as roles:
        turns = []
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
        with roles.session(model, optimizer=sgd, mode="async", staleness=staleness) as session:
            if session.is_worker:
                model.weight.data.zero_()
                for _ in range(TURNS):
                    session.pull()
                    began = time.monotonic()
                    time.sleep(SLOW_S if rank == size - 1 else 0)
                    model(torch.ones(1)).backward()
                    turns.append((began, time.monotonic()))
                    session.push()
        return (turns, model.weight.item()) if session.is_worker else session.report


@pytest.mark.parametrize("staleness", [0, 1, 3, None])
def test_staleness_bounds_the_lead_over_the_slowest(ranks, staleness):
    reports, results = split(ranks(4).run(race, 1, staleness), 1)
    (turns, _), (others, _), (slow, _) = results
    seen = 0
    for worker in (turns, others):
        for clock, (began, _) in enumerate(worker):
            behind = sum(pushed <= began for _, pushed in slow)
            seen = max(seen, clock - behind)
    most = TURNS if staleness is None else staleness
    assert seen <= most and reports[0].most_lead <= most
    assert reports[0].most_lead == staleness if staleness is not None else reports[0].most_lead > 3
    for _, value in results:  # every gradient is 1 and the rate is 1: none was lost, none counted twice
        assert value == -3 * TURNS
    assert reports[0].updates == 3 * TURNS and max(reports[0].staleness) >= 1


def test_staleness_holds_with_several_servers(ranks):
    reports, _ = split(ranks(4).run(race, 2, 1), 2)
    assert all(report.most_lead <= 1 for report in reports)


def split(results: list[Any], servers: int) -> tuple[list[Any], list[Any]]:
    return results[:servers], results[servers:]


def uneven(rank: int, size: int, mode: str) -> Any:
    """Train with different numbers of batches per worker; workers do not wait for a finished worker."""
    model = nn.Linear(1, 1, bias=False)
    with ParameterServer(world(), timeout_s=20) as roles:
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
        staleness = 0 if mode == "async" else None
        with roles.session(model, sgd, mode=mode, staleness=staleness) as session:
            if session.is_worker:
                model.weight.data.zero_()
                for _ in range(3 * (rank - 1)):  # the first worker has none
                    session.pull()
                    model(torch.ones(1)).backward()
                    session.push()
        return model.weight.item() if session.is_worker else session.report


@pytest.mark.parametrize(("mode", "expected"), [("sync", -6.0), ("async", -9.0)])
def test_workers_may_have_different_numbers_of_batches(ranks, mode, expected):
    report, *values = ranks(4).run(uneven, mode)
    assert values == [expected] * 3
    assert report.pushes == {1: 0, 2: 3, 3: 6}


def train_on_some_ranks(rank: int, size: int) -> Any:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    model = nn.Linear(2, 2)
    with ParameterServer(Communicator(group), timeout_s=20) as roles:
        with roles.session(model, lambda p: torch.optim.SGD(p, 0.1)) as session:
            if session.is_worker:
                session.pull()
                model(torch.ones(2)).sum().backward()
                session.push()
        return session.is_worker


def test_a_session_on_some_ranks(ranks):
    assert ranks(4).run(train_on_some_ranks) == [None, False, None, True]


def test_through_gloo(ranks):
    expected = train_alone(2, "sgd", 7, torch.float32)
    results = ranks(3, "gloo").run(train_served, 1, "sgd", 7, torch.float32, [4, 4])
    for values in results[1:]:
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def serve_few_tensors(rank: int, size: int) -> Any:
    """Train with more servers than tensors, and with an empty, a noncontiguous, a bf16 and a complex parameter."""
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
    if size == 4:
        model.empty = nn.Parameter(torch.zeros(0, 3))
        model.transposed = nn.Parameter(torch.arange(60_000.0).view(200, 300).t())
        model.complex = nn.Parameter(torch.full((100, 100), 3 + 4j))
    with ParameterServer(world(), size - 1, timeout_s=20) as roles:
        with roles.session(model, lambda p: torch.optim.SGD(p, 0.5)) as session:
            if session.is_worker:
                session.pull()
                sum(p.sum().abs() for p in model.parameters()).backward()
                session.push()
        return [p.detach() for p in model.parameters()]


def test_more_servers_than_parameters(ranks):
    (scalar,) = ranks(3).run(serve_few_tensors)[-1]
    assert scalar == 1.5 and scalar.dtype is torch.bfloat16


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_unusual_parameters(ranks, backend):
    scalar, empty, transposed, numbers = ranks(4, backend).run(serve_few_tensors)[-1]
    assert scalar == 1.5 and empty.shape == (0, 3)
    assert torch.equal(transposed, torch.arange(60_000.0).view(200, 300).t() - 0.5)
    torch.testing.assert_close(numbers, torch.full((100, 100), 2.7 + 3.6j))
