"""Unusual models and batches under axes that split the model: the losses, norms and weights of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.models.deepseek import build_deepseek
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.mixtral import build_mixtral
from farandole.models.moe import Balance, Router
from farandole.models.sequence import SequenceInfo
from farandole.parallel.precision import use_float8
from farandole.plan import Plan, PlanError
from tests.parallel.plans import DEEPSEEK, MIXTRAL, WORDS

Batch = tuple[Tensor, SequenceInfo | None, Tensor]
"""Tokens, the description of their sequences, and targets."""


@dataclass(frozen=True)
class Case:
    """A model, a change of the model, and the shape and the description of its micro-batches."""

    build: Callable[[], nn.Module]
    change: Callable[[Any], object] = lambda model: None
    shape: tuple[int, int] = (2, 9)
    documents: Callable[[int], Tensor] | None = None
    without_targets: tuple[int, ...] = ()


def _gpt(heads: int, width: int) -> Case:
    return Case(partial(build_gpt, GPTConfig(WORDS, 16, 2, heads, width, positions="learned")))


def _llama(heads: int, kv_heads: int, width: int = 4, **changes: Any) -> Case:
    config = LlamaConfig(WORDS, 2, heads, 4 * heads, 31, kv_heads=kv_heads, head_width=width)
    return Case(partial(build_llama, config), **changes)


def _freeze(model: nn.Module) -> None:
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(
            not any(part in key for part in ("tokens", "1.attention.qkv", "1.feed_forward", "norm"))
        )


def _send_all_to_two(model: nn.Module) -> None:
    """Let the routers select the first two experts for all tokens, and no token the other experts."""
    for module in model.modules():
        if isinstance(module, Router):
            nn.init.zeros_(module.weight)
            module.weight.requires_grad_(False)


def _padded(number: int) -> Tensor:
    """Return document numbers with gaps, and in every second batch a sequence of padding only."""
    return (
        torch.tensor([[0, 0, 3, 3, 3, 7, 7, -1, -1], [-1] * 9])
        if number % 2
        else torch.tensor([[5] * 9, [2, 2, 9, 9, 9, 9, 9, 9, 9]])
    )


CASES = {
    "5 heads": _gpt(5, 20),
    "2 key-value heads": _llama(12, 2, width=6),
    "narrow key-value heads": _llama(12, 2),
    "3 key-value heads": _llama(6, 3),
    "1 sequence": _llama(4, 2, shape=(1, 9)),
    "1 token": _llama(4, 2, shape=(1, 1)),
    "4 tokens": _llama(4, 2, shape=(1, 4)),
    "11 tokens": _llama(4, 4, shape=(3, 11)),
    "documents": _llama(4, 4, documents=_padded),
    "no targets": _llama(4, 2, without_targets=(0, 2)),
    "frozen": _llama(4, 2, change=_freeze),
    "frozen experts": Case(partial(build_mixtral, MIXTRAL), _freeze),
    "2 predictions": Case(
        partial(build_deepseek, replace(DEEPSEEK, predicted=2, balance=Balance(0.1, 0.1, 0.8)))
    ),
    "2 predictions, no capacity": Case(
        partial(build_deepseek, replace(DEEPSEEK, predicted=2)), documents=_padded
    ),
    "3 words": Case(partial(build_llama, LlamaConfig(3, 2, 4, 16, 31))),
    "3 words, 2 key-value heads": Case(partial(build_llama, LlamaConfig(3, 2, 4, 16, 31, kv_heads=2))),
    "unused experts": Case(partial(build_mixtral, MIXTRAL), _send_all_to_two),
    "unused experts and 1 token": Case(partial(build_mixtral, MIXTRAL), _send_all_to_two, shape=(1, 1)),
}

MICRO_BATCHES, STEPS = 4, 2


def _model(case: Case) -> Any:
    torch.manual_seed(0)
    model = case.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    case.change(model)
    return model


def _batch(case: Case, step: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + number)
    tokens, targets = torch.randint(0, WORDS, (2, *case.shape), generator=generator)
    documents = None if case.documents is None else case.documents(number)
    if documents is not None:
        targets[documents < 0] = -1
    if number in case.without_targets:
        targets[:] = -1
    return tokens, None if documents is None else SequenceInfo(documents=documents), targets


@dataclass(frozen=True)
class Found:
    """The losses, norms, evaluated losses and complete parameters of a run."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    weights: dict[str, Tensor]


def _train(rank: int, size: int, name: str, plan: Plan) -> Found:
    case = CASES[name]
    engine = farandole.parallelize(model := _model(case), plan)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = engine.optimizer(torch.optim.SGD(trained, 0.3, momentum=0.5))
    mine = range(MICRO_BATCHES)[engine.mesh.replica_of(rank) :: engine.mesh.replicas]
    losses, norms = [], []
    for step in range(STEPS):
        batches = [_batch(case, step, number) for number in mine]
        losses.append(engine.forward_backward(batches, lambda output, _: output, lambda batch: batch).loss)
        norms.append(engine.clip(0.5))
        optimizer.step()
        optimizer.zero_grad()
    evaluated = engine.evaluate(
        [_batch(case, STEPS, number) for number in mine], lambda output, _: output, lambda batch: batch
    )
    weights = engine.state_dict()
    engine.close()
    return Found(losses, norms, evaluated, weights)


SEQUENCE = Plan(tensor=2, sequence=True)
EXPERT = [Plan(expert=2), Plan(expert=4, zero=3), Plan(tensor=2, expert=2, sequence=True, zero=2)]
CONTEXT = [Plan(context=2, ring=2), Plan(context=4, ring=2), Plan(context=4, ring=4, zero=1)]


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("5 heads", [Plan(tensor=2), Plan(tensor=5), Plan(tensor=3, sequence=True)]),
        ("2 key-value heads", [Plan(tensor=4), Plan(tensor=6)]),
        ("3 key-value heads", [Plan(tensor=2), Plan(tensor=6)]),
        ("1 sequence", [CONTEXT[2], Plan(tensor=2, context=2, sequence=True)]),
        (
            "1 token",
            [Plan(tensor=4), Plan(tensor=4, sequence=True), Plan(tensor=2, data=2, sequence=True, zero=3)],
        ),
        ("4 tokens", CONTEXT[1:]),
        ("11 tokens", [Plan(context=3, ring=3), CONTEXT[1]]),
        ("documents", [*CONTEXT[1:], SEQUENCE]),
        ("no targets", [CONTEXT[1], Plan(data=4), Plan(data=2, tensor=2, zero=3)]),
        ("frozen", [SEQUENCE, CONTEXT[0], Plan(data=2, tensor=2, zero=3)]),
        ("frozen experts", EXPERT),
        ("2 predictions", [*EXPERT, SEQUENCE]),
        ("2 predictions, no capacity", [CONTEXT[1], EXPERT[2]]),
        ("unused experts", [*EXPERT, Plan(context=2)]),
        ("unused experts and 1 token", EXPERT),
    ],
)
def test_unusual_models_and_batches_train_as_one_process(ranks: Any, name: str, plans: list[Plan]) -> None:
    (expected,) = ranks(1).run(_train, name, Plan())
    for plan in plans:
        size = (plan.data or 1) * plan.ranks_per_sample * plan.expert
        for found in ranks(size).run(_train, name, plan):
            try:
                assert found.losses == pytest.approx(expected.losses, rel=2e-5)
                assert found.norms == pytest.approx(expected.norms, rel=2e-4)
                assert found.evaluated == pytest.approx(expected.evaluated, rel=2e-5)
                for key, value in expected.weights.items():
                    torch.testing.assert_close(
                        found.weights[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
                    )
            except AssertionError as error:
                error.add_note(str(plan))
                raise


def _train_after_trial(rank: int, size: int, plan: Plan) -> tuple[float, float]:
    """Train for a step while the graph of an earlier forward pass is alive; return the loss and the norm."""
    model = _model(CASES["unused experts"])
    batch = _batch(CASES["unused experts"], 0, 0)
    trial, _ = model(*batch)
    engine = farandole.parallelize(model, plan)
    loss = engine.forward_backward([batch], lambda output, _: output, lambda batch: batch).loss
    norm = engine.clip(1.0)
    engine.close()
    assert trial.grad_fn is not None
    return loss, norm


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor=2),
        Plan(expert=2),
        Plan(tensor=2, expert=2, zero=3),
        Plan(pipeline=2),
        Plan(context=2, zero=3),
    ],
)
def test_a_model_is_split_while_a_graph_is_alive(ranks: Any, plan: Plan) -> None:
    """Autograd keeps the gradient accumulators of a graph, which expect gradients of the complete shapes."""
    (expected,) = ranks(1).run(_train_after_trial, Plan())
    for found in ranks(plan.ranks_per_sample * plan.expert).run(_train_after_trial, plan):
        assert found == pytest.approx(expected, rel=2e-5)


def _refused(rank: int, size: int, name: str, plan: Plan) -> str:
    with pytest.raises(PlanError) as error:
        farandole.parallelize(_model(CASES[name]), plan)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "plan", "nearest"),
    [
        ("2 key-value heads", Plan(tensor=5), "nearest plans: tensor=4, tensor=6"),
        ("3 key-value heads", Plan(tensor=4), "nearest plans: tensor=2, tensor=3"),
        ("narrow key-value heads", Plan(tensor=6), "nearest plans: tensor=2, tensor=4"),
        ("5 heads", Plan(tensor=6), "nearest plans: tensor=4, tensor=5"),
        (
            "3 words",
            Plan(tensor=4),
            "0 has a vocabulary of 3 tokens, which cannot be split over 4 ranks; nearest plans: tensor=2, tensor=3",
        ),
        ("3 words, 2 key-value heads", Plan(tensor=4), "nearest plans: tensor=1, tensor=2"),
        ("2 predictions", Plan(context=2), "nearest plan: context=1, or a model without a capacity"),
        ("unused experts", Plan(expert=5), "nearest plan: expert=4"),
    ],
)
def test_plans_that_cannot_run_name_the_nearest(ranks: Any, name: str, plan: Plan, nearest: str) -> None:
    for message in ranks(plan.ranks_per_sample * plan.expert).run(_refused, name, plan):
        assert nearest in message


def _not_a_number(rank: int, size: int, plan: Plan) -> tuple[float, float]:
    """Train with an embedding that is not a number; return the loss and the norm."""
    model = _model(CASES["unused experts"])
    with torch.no_grad():
        model[0].tokens.weight[3] = math.nan
    engine = farandole.parallelize(model, plan)
    batch = _batch(CASES["unused experts"], 0, 0)
    batch[0][0, 4] = 3
    loss = engine.forward_backward([batch], lambda output, _: output, lambda batch: batch).loss
    norm = engine.clip(1.0)
    engine.close()
    return loss, norm


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor=2),
        Plan(tensor=2, sequence=True),
        Plan(context=2),
        Plan(expert=2),
        Plan(tensor=2, expert=2, zero=3),
    ],
)
def test_values_that_are_not_numbers_reach_all_ranks(ranks: Any, plan: Plan) -> None:
    for loss, norm in ranks(plan.ranks_per_sample * plan.expert).run(_not_a_number, plan):
        assert math.isnan(loss) and math.isnan(norm)


def _accumulate(rank: int, size: int, name: str, plan: Plan) -> dict[str, Tensor]:
    """Accumulate the gradients of micro-batches in a plain loop; only the last backward pass synchronizes."""
    case = CASES[name]
    engine = farandole.parallelize(model := _model(case), plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.3))
    mine = range(4)[engine.mesh.replica_of(rank) :: engine.mesh.replicas]
    for position, number in enumerate(mine):
        tokens, info, targets = _batch(case, 0, number)
        with nullcontext() if position == len(mine) - 1 else engine.no_sync():
            total, _ = engine(tokens, info, targets)
            (total / (10 * len(mine))).backward()
    optimizer.step()
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (Plan(tensor=2), "2 predictions, no capacity"),
        (Plan(tensor=2, sequence=True, expert=2), "2 predictions, no capacity"),
        (Plan(expert=2, zero=1), "2 predictions, no capacity"),
        (Plan(context=2, ring=2), "documents"),
    ],
)
def test_gradients_accumulate_without_synchronization(ranks: Any, plan: Plan, name: str) -> None:
    model = _model(CASES[name])
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for number in range(4):
        tokens, info, targets = _batch(CASES[name], 0, number)
        total, _ = model(tokens, info, targets)
        (total / 40).backward()
    optimizer.step()
    expected = model.state_dict()
    for found in ranks(plan.ranks_per_sample * plan.expert).run(_accumulate, name, plan):
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )


def _float8(rank: int, size: int, plan: Plan) -> list[float]:
    """Train with linear layers that multiply 8-bit floats."""
    torch.manual_seed(0)
    model: Any = build_llama(LlamaConfig(WORDS, 2, 4, 32, 64, kv_heads=2, head_width=16))
    assert len(use_float8(model[1:3], emulate=True)) == 8
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.3))
    losses = []
    for step in range(3):
        batch = _batch(CASES["1 sequence"], step, 0)
        losses.append(engine.forward_backward([batch], lambda output, _: output, lambda batch: batch).loss)
        losses.append(engine.clip(1.0))
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return losses


@pytest.mark.parametrize(
    "plan", [Plan(tensor=2), Plan(tensor=2, sequence=True), Plan(tensor=2, context=2, zero=1)]
)
def test_linear_layers_multiply_8_bit_floats_under_tensor_parallelism(ranks: Any, plan: Plan) -> None:
    """Each rank scales its part of a matrix, which rounds differently: by 1/16 of a value at most."""
    (expected,) = ranks(1).run(_float8, Plan())
    for found in ranks(plan.ranks_per_sample).run(_float8, plan):
        assert found == pytest.approx(expected, rel=2e-2)
