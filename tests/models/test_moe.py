"""Router losses, capacities and load statistics of mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from farandole.memory.recompute import apply_recompute
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import Balance, MixtureOfExperts, kept_within, take_loads
from farandole.models.sequence import SequenceInfo, Transformer

WORDS = 23
CONFIG = MixtralConfig(WORDS, layers=2, heads=2, width=16, inner=12, experts=4, top=2)


def _model(balance: Balance) -> Transformer:
    torch.manual_seed(0)
    model = build_mixtral(replace(CONFIG, balance=balance))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def _tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randint(0, WORDS, (rows, length), generator=generator) for _ in range(2))  # type: ignore[return-value]


def _router_losses(model: Transformer, tokens: Tensor, info: SequenceInfo) -> tuple[Tensor, Tensor]:
    """Return transformers' balancing loss of each layer and the z-loss for one sequence, with gradients."""
    logits: list[Tensor] = []
    hooks = [
        module.router.register_forward_hook(lambda _, __, routing: logits.append(routing.logits))
        for module in model.modules()
        if isinstance(module, MixtureOfExperts)
    ]
    model(tokens, info)
    for hook in hooks:
        hook.remove()
    balancing = sum(load_balancing_loss_func((each,), 4, 2) for each in logits)
    assert isinstance(balancing, Tensor)
    return balancing / 2, sum(each.logsumexp(-1).square().mean() for each in logits)  # type: ignore[return-value]


@pytest.mark.parametrize("mode", ["none", "block", "selective"])
def test_router_losses_equal_those_of_transformers_for_each_sequence(mode: Any) -> None:
    tokens, targets = _tokens(3, 7)
    targets[0, :4] = -1
    counts = (targets >= 0).sum(1)
    plain = _model(Balance())
    total, count = plain(tokens, None, targets)
    for row, weight in zip(tokens, counts, strict=True):
        balancing, squares = _router_losses(plain, row[None], SequenceInfo())
        total = total + weight * (0.1 * balancing + 0.01 * squares)
    (total / count).backward()

    model = _model(Balance(loss=0.1, z_loss=0.01))
    apply_recompute(model, mode)
    found, number = model(tokens, None, targets)
    (found / number).backward()
    torch.testing.assert_close(found, total)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_padding_does_not_change_router_losses() -> None:
    tokens, targets = _tokens(2, 6)
    model = _model(Balance(loss=0.3, z_loss=0.1))
    total, _ = model(tokens, None, targets)
    padded = F.pad(tokens, (0, 3)), F.pad(targets, (0, 3), value=-1)
    documents = F.pad(torch.zeros_like(tokens), (0, 3), value=-1)
    torch.testing.assert_close(model(padded[0], SequenceInfo(documents=documents), padded[1])[0], total)


def test_evaluation_has_no_router_losses_and_no_capacity() -> None:
    tokens, targets = _tokens(2, 6)
    plain = _model(Balance()).eval()(tokens, None, targets)
    balanced = _model(Balance(loss=1.0, z_loss=1.0, capacity=0.1)).eval()(tokens, None, targets)
    assert torch.equal(plain[0], balanced[0])


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_capacity_keeps_the_first_tokens_of_each_sequence(data: st.DataObject) -> None:
    sequences, length, count = (data.draw(st.integers(1, most)) for most in (3, 9, 5))
    top = data.draw(st.integers(1, count))
    capacity = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    experts = torch.rand(sequences * length, count, generator=generator).argsort(-1)[:, :top]
    kept = kept_within(capacity, experts, sequences, count)
    expected = torch.zeros_like(experts, dtype=torch.bool)
    for sequence in range(sequences):
        room = [capacity] * count
        for choice in range(top):
            for token in range(sequence * length, (sequence + 1) * length):
                expert = int(experts[token, choice])
                expected[token, choice] = room[expert] > 0
                room[expert] -= 1
    assert torch.equal(kept, expected)


def test_dropped_tokens_are_counted_and_pass_unchanged() -> None:
    module = next(m for m in _model(Balance(capacity=0.5)).modules() if isinstance(m, MixtureOfExperts))
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[:2] = 1.0  # all tokens choose experts 0 and 1
    x = torch.rand(2, 8, 16)
    result = module(x)
    capacity = math.ceil(0.5 * 2 * 8 / 4)
    assert bool((result[:, :capacity] != 0).all())
    assert bool((result[:, capacity:] == 0).all())
    load = take_loads(module)["router"]
    assert load.tokens.tolist() == [16, 16, 0, 0]
    assert load.imbalance == 2
    assert load.dropped == pytest.approx(1 - capacity / 8)
    assert take_loads(module)["router"].tokens.sum() == 0


def test_a_balancing_loss_balances_the_experts() -> None:
    tokens, targets = _tokens(8, 16)
    found = {}
    for coefficient in (0.0, 0.5):
        model = _model(Balance(loss=coefficient))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(60):
            total, count = model(tokens, None, targets)
            (total / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            loads = take_loads(model)
        found[coefficient] = max(load.imbalance for load in loads.values())
    assert found[0.5] < min(1.25, found[0.0])


@pytest.mark.parametrize("options", [{"loss": -1.0}, {"z_loss": math.nan}, {"capacity": 0.0}])
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected a"):
        Balance(**options)
