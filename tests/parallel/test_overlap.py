"""Test that collectives overlap: reductions start during the backward pass, and gathers of weights start before any is awaited."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.parallel.bucket import Bucket
from farandole.parallel.engine import Engine

LAYERS = 5


class Recorded:
    """A work object that records when it is awaited."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        self._events.append("wait")
        self._work.wait()


def _gathers(rank: int, size: int, zero: int) -> list[str]:
    """Return the starts and waits of asynchronous gathers in an update."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    engine = Engine(model, Communicator(torch.distributed.group.WORLD), bucket_bytes=200, zero=zero)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    events: list[str] = []
    plain = Communicator.all_gather

    def all_gather(comm: Communicator, output: Any, input: Tensor, **options: Any) -> Any:
        work = plain(comm, output, input, **options)
        if options.get("async_op"):
            events.append("start")
            return Recorded(work, events)
        return work

    engine(torch.ones(2, 8)).sum().backward()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Communicator, "all_gather", all_gather)
        optimizer.step()
    assert len(engine.buckets) >= LAYERS
    engine.close()
    return events


@pytest.mark.parametrize("zero", [1, 2])
def test_all_gathers_of_updated_weights_start_before_any_is_awaited(ranks: Any, zero: int) -> None:
    for events in ranks(2, "gloo").run(_gathers, zero):
        count = len(events) // 2
        assert count >= LAYERS
        assert events == ["start"] * count + ["wait"] * count


def _reductions(rank: int, size: int, zero: int) -> tuple[int, int, int]:
    """Return the number of buckets, and of reductions that start before and after the first layer's gradient exists."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    engine = Engine(model, Communicator(torch.distributed.group.WORLD), bucket_bytes=200, zero=zero)
    started = 0
    before = 0
    plain = Bucket.reduce_async

    def reduce_async(bucket: Bucket) -> None:
        nonlocal started
        started += 1
        plain(bucket)

    def arrives(_: Tensor) -> None:
        nonlocal before
        before = started

    inputs = torch.ones(2, 8, requires_grad=True)
    inputs.register_hook(arrives)  # the last gradient of the pass, after those of all parameters
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Bucket, "reduce_async", reduce_async)
        engine(inputs).sum().backward()
    count = len(engine.buckets)
    engine.close()
    return count, before, started - before


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_reductions_start_during_the_backward_pass(ranks: Any, zero: int, backend: str) -> None:
    for count, before, after in ranks(2, backend).run(_reductions, zero):
        assert before + after == count > LAYERS / 2
        assert before >= LAYERS - 1  # all but the weight of the first layer, and the biases
