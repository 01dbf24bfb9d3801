"""Plain PyTorch loops with axes that split the model: the result of one process, or an error that names the call to
use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.plan import Plan
from tests.parallel.plans import WORDS, build, inputs_of

STEPS = 2


def _loop(
    model: nn.Module, call: nn.Module | Any, optimizer: torch.optim.Optimizer, name: str, replicas: list[int]
) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step; the loss is the mean over `replicas`."""
    found = []
    for step in range(STEPS):
        losses = []
        for replica in replicas:
            tokens, targets = inputs_of(name, step, replica)
            total, count = call(tokens, None, targets)
            losses.append(total / count)
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), float(norm)))
    return found


def _parallel(
    rank: int, size: int, name: str, plan: Plan
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    engine = farandole.parallelize(model := build(name), plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.5, momentum=0.9))
    found = _loop(model, engine, optimizer, name, [engine.mesh.replica_of(rank)])
    state = engine.state_dict()
    engine.close()
    return found, state


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", Plan(tensor=2)),
        ("llama", Plan(tensor=4, sequence=True)),
        ("llama", Plan(tensor=2, zero=1, data=2)),
        ("llama", Plan(context=2)),
        ("llama", Plan(context=3)),
        ("mixtral", Plan(expert=2)),
        ("mixtral", Plan(tensor=2, expert=2)),
        ("deepseek", Plan(context=2, ring=2)),
    ],
)
def test_clipping_and_means_give_the_result_of_one_process(ranks: Any, name: str, plan: Plan) -> None:
    replicas = (plan.data or 1) * plan.expert
    alone = build(name)
    optimizer = torch.optim.SGD(alone.parameters(), 0.5, momentum=0.9)
    expected = _loop(alone, alone, optimizer, name, list(range(replicas)))
    results = ranks(replicas * plan.ranks_per_sample).run(_parallel, name, plan)
    if replicas == 1:
        for found, _ in results:
            assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    for found, state in results:
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-4)
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


def _changed(model: nn.Module) -> dict[str, Tensor]:
    return {key: value * 0.5 + 0.01 for key, value in model.state_dict().items()}


def _states(rank: int, size: int, name: str, plan: Plan) -> list[str]:
    """Read, change and load the state of a split model; return the messages of refused calls."""
    expected = build(name).state_dict()
    engine = farandole.parallelize(model := build(name), plan)
    engine.optimizer(torch.optim.SGD(model.parameters(), 0.5))

    def check(wanted: dict[str, Tensor]) -> None:
        for key, value in engine.state_dict().items():
            assert torch.equal(value, wanted[key]), key
        names = {id(parameter): key for key, parameter in model.named_parameters()}
        for parameter, value in engine.whole_parameters():
            assert torch.equal(value, wanted[names[id(parameter)]]), names[id(parameter)]

    check(expected)
    with engine.edit_parameters(), torch.no_grad():
        for key, parameter in model.named_parameters():
            assert parameter.shape == expected[key].shape
            parameter.mul_(0.5).add_(0.01)
    other = _changed(build(name))
    check(other)
    model.load_state_dict(expected)
    check(expected)
    child: Any = model
    child[1].load_state_dict({k.partition(".")[2]: v for k, v in other.items() if k.startswith("1.")})
    check({key: other[key] if key.startswith("1.") else value for key, value in expected.items()})
    model.load_state_dict(other)
    refused = []
    for call in (model.state_dict, lambda: copy.deepcopy(model), lambda: child[1].state_dict()):
        with pytest.raises(RuntimeError) as error:
            call()
        refused.append(str(error.value))
    model.eval()
    alone = build(name).eval()
    alone.load_state_dict(other)
    with torch.no_grad():
        tokens = inputs_of(name, 0, 0)[0]
        torch.testing.assert_close(engine(tokens), alone(tokens), rtol=1e-4, atol=1e-5)
    engine.close()
    return refused


@pytest.mark.parametrize(
    ("name", "plan", "backend"),
    [
        ("llama", Plan(tensor=4), "farandole"),
        ("llama", Plan(data=2, tensor=2, zero=3), "farandole"),
        ("llama", Plan(data=2, tensor=2, zero=3), "gloo"),
        ("mixtral", Plan(data=2, expert=2, zero=1), "farandole"),
        ("mixtral", Plan(tensor=2, expert=2), "farandole"),
    ],
)
def test_states_are_complete(ranks: Any, name: str, plan: Plan, backend: str) -> None:
    for messages in ranks(4, backend).run(_states, name, plan):
        assert all("engine.state_dict()" in message for message in messages)


def _wrong_tokens(rank: int, size: int, plan: Plan) -> list[str]:
    tokens, targets = inputs_of("llama", 0, 0)
    engine = farandole.parallelize(build("llama"), plan)
    found = []
    for number in (-1, WORDS):
        wrong = tokens.clone()
        wrong[1, 2] = number
        with pytest.raises(IndexError) as error:
            engine(wrong)
        found.append(str(error.value))
    wrong = targets.clone()
    wrong[1, 2] = WORDS
    for train in (True, False):
        with torch.set_grad_enabled(train), pytest.raises(IndexError) as error:
            engine(tokens, None, wrong)
        found.append(str(error.value))
    engine.close()
    return found


def test_numbers_outside_of_the_vocabulary_are_refused(ranks: Any) -> None:
    for size, plan in [(1, Plan()), (2, Plan(tensor=2)), (2, Plan(tensor=2, sequence=True))]:
        for messages in ranks(size).run(_wrong_tokens, plan):
            assert size == 1 or f"expected tokens from 0 to {WORDS - 1}" in messages[0]
            assert all("expected targets below 29" in message for message in messages[2:])
