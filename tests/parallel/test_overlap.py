"""Test that reductions start during the backward pass, and that gathers of weights start before any gather is
awaited."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.parallel.bucket import Bucket
from farandole.parallel.engine import Engine
from farandole.parallel.zero.sharding import box_mesh

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


def _launches(rank: int, size: int) -> tuple[list[int], list[str]]:
    """Return the groups of weights that a tied GPT gathers in a forward pass, and its launches and blocks in order."""
    torch.manual_seed(0)
    model = build_gpt(GPTConfig(vocabulary=13, context=6, layers=LAYERS, heads=2, width=8))
    engine = Engine(model, Communicator(torch.distributed.group.WORLD), zero=3)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    tokens = torch.ones(2, 6, dtype=torch.long)
    events: list[str] = []
    gathered: list[int] = []
    assert engine._gatherer is not None
    groups, order = len(engine._gatherer._groups), engine._gatherer._order
    plain = order._launch

    def launch(item: int) -> None:
        if order.kind == "forward":
            gathered.append(item)
        events.append(f"gather {item}" if item < groups else f"reduce {item - groups}")
        plain(item)

    for _ in range(2):  # the first step agrees on the order
        engine(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for number, block in enumerate(model):
        block.register_forward_hook(lambda *_, number=number: events.append(f"end {number}"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(order, "_launch", launch)
        engine(tokens).sum().backward()
    engine.close()
    return gathered, events


def test_gathered_weights_overlap_with_computation(ranks: Any) -> None:
    for gathered, events in ranks(2, "gloo").run(_launches):
        assert len(gathered) == len(set(gathered)), "tied weights are gathered once"
        last = LAYERS + 1  # the output layer, after the embedding and the layers
        forward, backward = (
            events[: events.index(f"end {last}") + 1],
            events[events.index(f"end {last}") + 1 :],
        )
        for number in range(2, LAYERS + 1):
            assert forward.index(f"gather {number}") < forward.index(f"end {number - 1}")
        gathers = [event for event in backward if event.startswith("gather")]
        reductions = [event for event in backward if event.startswith("reduce")]
        assert len(reductions) > LAYERS
        for gather, reduction in zip(gathers, reductions, strict=False):  # while the gradients are computed
            assert backward.index(gather) < backward.index(reduction)


def _stages_of_reductions(rank: int, size: int) -> list[str]:
    """Return the asynchronous collectives of a backward pass in which groups of two ranks gather weights."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    comm = Communicator(torch.distributed.group.WORLD)
    engine = Engine(model, comm, zero=3, mesh=box_mesh(size, data_shard=2))
    events: list[str] = []
    for _ in range(2):  # the first step agrees on the order
        events.clear()
        output = engine(torch.ones(2, 8)).sum()
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name in ("reduce_scatter", "all_reduce"):
                plain = getattr(Communicator, name)

                def call(
                    comm: Any, *tensors: Any, plain: Any = plain, name: str = name, **options: Any
                ) -> Any:
                    if options.get("async_op"):
                        events.append(name)
                    return plain(comm, *tensors, **options)

                monkeypatch.setattr(Communicator, name, call)
            output.backward()
        engine.zero_grad()
    engine.close()
    return events


def test_reductions_between_groups_overlap_with_reductions_within_groups(ranks: Any) -> None:
    within, between = "reduce_scatter", "all_reduce"
    for events in ranks(4, "gloo").run(_stages_of_reductions):
        assert events == [within, *[within, between] * (LAYERS - 1), between]
