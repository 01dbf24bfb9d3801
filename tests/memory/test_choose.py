"""Automatic choice: most bytes for each operation first, until the budget is kept."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.memory.choose import Option, cheapest_first
from farandole.memory.measure import saved_bytes
from farandole.memory.recompute import apply_recompute
from tests.memory.models import CASES, assert_same, small_gpt, step


@pytest.mark.parametrize("name", ["gpt", "keywords"])
def test_budgets_are_kept(name: str) -> None:
    torch.manual_seed(0)
    model, example = CASES[name]()
    twin = copy.deepcopy(model)
    most = apply_recompute(model, "none", example=example).before
    least = apply_recompute(model, "block", example=example).after
    assert most is not None and least is not None
    flops = []
    for budget in (most, (most + least) // 2, least):
        chosen = apply_recompute(model, "auto", example=example, budget_bytes=budget)
        assert chosen.before == most and chosen.after is not None and chosen.after <= budget
        assert (
            chosen.after == saved_bytes(model, example).total == saved_bytes(model, example, real=True).total
        )
        assert (chosen.modules == {}) == (budget == most)
        flops.append(chosen.flops)
        assert_same(step(model, example), step(copy.deepcopy(twin), example))
        twin.load_state_dict(model.state_dict())
    assert flops == sorted(flops) and flops[0] == 0


def test_a_budget_that_cannot_be_kept_is_refused_with_the_least() -> None:
    model, tokens = small_gpt()
    least = apply_recompute(model, "block", example=tokens).after
    assert least is not None
    with pytest.raises(ValueError, match=rf"give at least budget_bytes={least}, or a smaller example"):
        apply_recompute(model, "auto", example=tokens, budget_bytes=least - 1)
    assert not any("_farandole_around" in vars(module) for module in model.modules())
    assert apply_recompute(model, "auto", example=tokens, budget_bytes=least).after == least


OPTIONS = st.fixed_dictionaries(
    {way: st.builds(Option, st.integers(-5, 50), st.integers(0, 9)) for way in ("selective", "block")}
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPTIONS, max_size=4))
def test_choices_grow_up_to_all_that_can_be_spared(options: list[dict[str, Option]]) -> None:
    blocks = {str(index): ways for index, ways in enumerate(options)}
    before = 0
    for spared, ways in cheapest_first(blocks):
        assert spared == sum(blocks[name][way].spared for name, way in ways.items()) > before
        before = spared
    everything = product(*([Option(0, 0), *ways.values()] for ways in options))
    assert before == max(sum(option.spared for option in some) for some in everything)


def test_the_first_choice_spares_most_for_each_operation() -> None:
    blocks = {
        "dear": {"block": Option(100, 100)},
        "cheap": {"selective": Option(50, 10), "block": Option(60, 1000)},
        "free": {"selective": Option(1, 0)},
    }
    orders = [list(ways.items()) for _, ways in cheapest_first(blocks)]
    assert orders[0] == [("free", "selective")]
    assert orders[1][-1] == ("cheap", "selective")
    assert orders[2][-1] == ("dear", "block")
    assert dict(orders[3])["cheap"] == "block" and len(orders) == 4
