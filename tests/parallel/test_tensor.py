"""Tensor parallelism: every width gives the losses, gradients and weights of one process."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole
from farandole.layout import Part
from farandole.parallel.tensor import Rule, register
from farandole.parallel.tensor.regions import ColumnLinear
from farandole.plan import LoRA, Plan, PlanError
from tests.parallel.plans import MODELS, alone, build, compare, train


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_width_trains_as_one_process(ranks: Any, name: str, size: int) -> None:
    width = 3 if name == "uneven" and size == 4 else size
    plan = Plan(tensor=width)
    expected = alone(ranks, name)
    compare(ranks(width).run(train, name, plan), expected, name, plan, width)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_and_tensor_parallelism_train_as_one_process(ranks: Any, zero: int) -> None:
    plan = Plan(tensor=2, zero=zero)
    expected = alone(ranks, "llama", replicas=2)
    compare(ranks(4).run(train, "llama", plan), expected, "llama", plan, 4)


@pytest.mark.parametrize("name", ["gpt", "llama", "uneven", "gptj", "mixtral", "deepseek"])
def test_sequence_parallelism_trains_as_one_process(ranks: Any, name: str) -> None:
    expected = alone(ranks, name)
    for size in (2, 3) if name == "uneven" else (2, 4):  # 18 tokens: 4 ranks have 5, 5, 4 and 4
        plan = Plan(tensor=size, sequence=True)
        compare(ranks(size).run(train, name, plan), expected, name, plan, size)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt", "llama", "deepseek"])
def test_dropout_does_not_depend_on_the_width(ranks: Any, name: str, sequence: bool) -> None:
    expected = alone(ranks, name, dropout=0.2)
    for size in (2, 4):
        plan = Plan(tensor=size, sequence=sequence)
        compare(ranks(size).run(train, name, plan, 0, 0.2), expected, name, plan, size)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_adapters_are_sharded_like_their_layers(ranks: Any, zero: int, sequence: bool) -> None:
    lora = LoRA(4, 8.0, dropout=0.1, bias="all")
    expected = alone(ranks, "llama", Plan(lora=lora))
    for size in (2, 4):
        plan = Plan(tensor=size, zero=zero, lora=lora, sequence=sequence)
        compare(ranks(size).run(train, "llama", plan), expected, "llama", plan, size)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recompute", ["block", "selective", "attention"])
def test_recomputation_repeats_the_collectives(ranks: Any, recompute: Any, sequence: bool) -> None:
    plan = Plan(tensor=2, sequence=sequence, recompute=recompute)
    expected = alone(ranks, "gpt", dropout=0.2)
    compare(ranks(2).run(train, "gpt", plan, 0, 0.2), expected, "gpt", plan, 2)


@pytest.mark.parametrize("name", ["gpt", "llama", "uneven", "t5"])
def test_gradients_are_summed_while_other_gradients_are_computed(ranks: Any, name: str) -> None:
    """Gloo does not share memory, so the backward pass of column layers overlaps with communication."""
    alone = ranks(1).run(train, name, Plan())[0]
    for plan in (Plan(tensor=2), Plan(tensor=2, zero=3, recompute="block")):
        compare(ranks(2, "gloo").run(train, name, plan), alone, name, plan, 2)
    assert ranks(2, "gloo").run(_overlapped, name)[0]
    assert not ranks(2).run(_overlapped, name)[0]


def _overlapped(rank: int, size: int, name: str) -> list[str]:
    model = build(name)
    farandole.parallelize(model, Plan(tensor=2)).close()
    return [path for path, module in model.named_modules() if isinstance(module, ColumnLinear)]


def _refused(rank: int, size: int, name: str, plan: Plan) -> str:
    model = nn.Linear(3, 3) if name == "linear" else build(name)
    with pytest.raises(PlanError) as error:
        farandole.parallelize(model, plan)
    return str(error.value)


def test_sizes_that_do_not_divide_are_refused_with_the_nearest(ranks: Any) -> None:
    for name, size, expected in [
        (
            "llama",
            3,
            "2 key-value heads of width 4, which cannot be split over 3 ranks; nearest plans: tensor=2, tensor=4",
        ),
        ("linear", 2, "Linear has no module with a rule"),
    ]:
        for message in ranks(size).run(_refused, name, Plan(tensor=size)):
            assert expected in message
    (message,) = set(ranks(2).run(_refused, "bert", Plan(tensor=2, sequence=True)))
    assert "expected a model with an Embedding and a Head, got BERT" in message
    (message,) = set(ranks(3).run(_refused, "gpt", Plan(tensor=2)))
    assert message == (
        "tensor=2: expected a multiple of 2 ranks, got 3; nearest plan: data=1 with 2 ranks; "
        "see 'farandole explain planerror'"
    )


class _Network(nn.Module):
    """A gated feed-forward network with a registered rule, and dropout of its input, inner layers and output."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 2 * units), nn.Linear(units, 16)
        self.both, self.product, self.outer = nn.Dropout(0.2), nn.Dropout(0.1), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.first(self.outer(x))).chunk(2, -1)
        result: Tensor = self.outer(self.last(self.product(gate.relu() * up)))
        return result


def _units(module: Any, ranks: int) -> tuple[Part, ...]:
    return (Part(module.last.in_features),)


def _gates_and_units(module: Any, ranks: int) -> tuple[Part, ...]:
    return _units(module, ranks) * 2


RULE = Rule(
    {"first": _gates_and_units},
    {"last": _units},
    dropout={"both": (-1, _gates_and_units), "product": (-1, _units), "outer": None},
)
register(_Network, RULE)


def _without_units(rank: int, size: int) -> tuple[str, list[torch.Size]]:
    model = nn.Sequential(_Network(5), _Network(3))
    with pytest.raises(PlanError) as error:
        farandole.parallelize(model, Plan(tensor=size))
    return str(error.value), [parameter.shape for parameter in model.parameters()]


def test_ranks_without_units_are_refused(ranks: Any) -> None:
    shapes = [parameter.shape for parameter in nn.Sequential(_Network(5), _Network(3)).parameters()]
    for message, found in ranks(4).run(_without_units):
        assert message.startswith(
            "tensor=4: 1 has 3 units in first, which cannot be split over 4 ranks; nearest plans: tensor=2, tensor=3"
        )
        assert found == shapes


def _registered(rank: int, size: int, units: int, zero: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train networks with a registered rule; return the losses and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(16), _Network(units), nn.Dropout(0.1), _Network(units), nn.Linear(16, 1)
    )
    torch.manual_seed(7 + rank)
    engine = farandole.parallelize(model, Plan(tensor=size, zero=zero))
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.3))
    losses = []
    for step in range(3):
        loss = (engine(torch.randn(6, 16, generator=torch.Generator().manual_seed(step))) - 1).square().mean()
        engine.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = engine.state_dict()
    engine.close()
    return losses, weights


@pytest.mark.parametrize("units", [8, 13])
def test_dropout_in_a_registered_region_does_not_depend_on_the_width(ranks: Any, units: int) -> None:
    ((expected, weights),) = ranks(1).run(_registered, units, 0)
    for size, zero in [(2, 0), (3, 2), (4, 3)]:
        for losses, found in ranks(size).run(_registered, units, zero):
            assert losses == pytest.approx(expected, rel=1e-5)
            torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-6)


class _Drawing(nn.Module):
    """A network with `nn.Dropout` layers and, if `functional` is True, a call of `F.dropout`."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 16)
        self.inner, self.outer, self.functional = nn.Dropout(0.2), nn.Dropout(0.1), functional

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.first(x))
        if self.functional:
            x = F.dropout(x, 0.1, self.training)
        result: Tensor = self.outer(self.last(x))
        return result


register(_Drawing, Rule({"first": _units}, {"last": _units}, dropout={"inner": (-1, _units), "outer": None}))


def _draw_warnings(rank: int, size: int) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("farandole").addHandler(handler)
    model = nn.Sequential(_Drawing(False), _Drawing(True), nn.Dropout(0.1))
    with closing(farandole.parallelize(model, Plan(tensor=size))) as engine:
        for mode in (False, False, True, True):
            model.train(mode)
            engine(torch.randn(3, 16))
    logging.getLogger("farandole").removeHandler(handler)
    return found


def test_functional_dropout_in_a_registered_region_is_reported_once(ranks: Any) -> None:
    for messages in ranks(2).run(_draw_warnings):
        assert [message.partition(" outside")[0] for message in messages] == ["1 draws random numbers"]


def _undescribed(rank: int, size: int, dropout: Any, layer: nn.Module | None) -> str:
    class Network(_Network):
        pass

    register(Network, replace(RULE, dropout=dropout))
    model = Network(8)
    if layer is not None:
        model.product = layer  # type: ignore[assignment]
    try:
        farandole.parallelize(model, Plan(tensor=size)).close()
    except PlanError as error:
        return str(error)
    return ""


def test_rules_describe_the_dropout_of_their_regions(ranks: Any) -> None:
    described = dict(RULE.dropout)
    without = {name: split for name, split in described.items() if name != "product"}
    for dropout, layer, expected in [
        (
            without,
            None,
            "product in a Network is a dropout layer with p=0.1, but the rule does not describe its",
        ),
        (without, nn.Dropout(0), ""),
        (described, nn.Identity(), ""),
        (described, nn.AlphaDropout(0.1), "expected nn.Dropout for a split input, got AlphaDropout"),
    ]:
        for message in ranks(2).run(_undescribed, dropout, layer):
            assert expected in message and bool(expected) == bool(message)
