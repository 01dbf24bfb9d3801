"""Tensor parallelism: every width gives the losses, gradients and weights of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
    """A feed-forward network with a registered rule."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, units), nn.Linear(units, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x).relu())
        return result


def _units(module: Any, ranks: int) -> tuple[Part, ...]:
    return (Part(module.last.in_features),)


register(_Network, Rule({"first": _units}, {"last": _units}))


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
