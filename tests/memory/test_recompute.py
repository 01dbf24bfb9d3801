"""Recomputation changes only which activations are kept: gradients equal those of plain torch, bit for bit."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farandole.memory.dry_run import saved_bytes
from farandole.memory.recompute import Option, apply_recompute, cheapest_first, recomputing
from tests.memory.models import CASES, assert_same, keywords, small_encoder, small_gpt, small_resnet, step

WAYS = ("block", "selective", "attention")


def steps(case: tuple[nn.Module, Any], way: str, **more: Any) -> None:
    """Compare two steps of a model and of a copy that recomputes; then make the copy plain again."""
    model, example = case
    twin = copy.deepcopy(model)
    plain = {type(module) for module in model.modules()}
    names = list(model.state_dict())
    if way == "attention":
        more["example"] = example
    chosen = apply_recompute(twin, way, **more)
    assert chosen.modules and set(chosen.modules.values()) == {way}
    assert list(twin.state_dict()) == names and repr(twin) == repr(model)
    for _ in range(2):  # a selective recomputation keeps less the second time
        assert_same(step(twin, example), step(model, example))
    apply_recompute(twin, "none")
    assert {type(module) for module in twin.modules()} == plain
    assert_same(step(twin, example), step(model, example))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_results_are_bitwise_equal(name: str, way: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    if way == "attention" and name in ("resnet", "keywords"):
        with pytest.raises(ValueError, match="no module of this model computes attention; use 'selective'"):
            apply_recompute(case[0], "attention", example=case[1])
        return
    steps(case, way)


@pytest.mark.parametrize("way", WAYS)
def test_under_autocast(way: str) -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):  # attention uses explicit products there
        steps(small_gpt(), way)


@pytest.mark.parametrize("way", ["block", "selective"])
def test_with_an_example(way: str) -> None:
    torch.manual_seed(0)
    for case in (small_gpt(), keywords()):
        before = step(*case)["random state"]
        steps(case, way, example=case[1])
        assert torch.equal(step(*case)["random state"], before)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_parts_and_inputs_with_gradients(way: str) -> None:
    torch.manual_seed(0)
    encoder, x = small_encoder()
    steps((encoder, x.requires_grad_()), way)
    gpt, tokens = small_gpt()
    for parameter in gpt[:2].parameters():
        parameter.requires_grad_(False)
    steps((gpt, tokens), way)
    for parameter in gpt.parameters():
        parameter.requires_grad_(False)
    apply_recompute(gpt, way, example=tokens)
    assert not gpt(tokens).requires_grad


def test_eval_mode_and_retained_graphs() -> None:
    torch.manual_seed(0)
    model, x = small_encoder()
    model.eval()
    for way in WAYS:
        apply_recompute(model, "none")
        wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        apply_recompute(model, way, example=x)
        loss = model(x).square().sum()
        for retain in (True, True, False):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain)
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    )
    x = torch.randn(3, 4, requires_grad=True)

    def second() -> Tensor:
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    wanted = second()
    for way in ("block", "selective"):
        apply_recompute(model, way)
        assert torch.equal(second(), wanted)


def calls_counted(module: nn.Module) -> list[bool]:
    """Return a list that receives, for each forward call of `module`, whether the call is a recomputation."""
    calls: list[bool] = []
    module.register_forward_pre_hook(lambda *_: calls.append(recomputing()))
    return calls


def test_nothing_is_recomputed_without_gradients() -> None:
    model, tokens = small_gpt()
    apply_recompute(model, "block")
    state = torch.get_rng_state()
    with torch.no_grad():
        model.eval()(tokens)
    assert torch.equal(torch.get_rng_state(), state)
    calls = calls_counted(model[1])
    with torch.no_grad():
        model(tokens)
    assert calls == [False]
    with torch.inference_mode():
        model(tokens)


def test_pre_hooks_run_in_the_recomputation_before_parameters_are_used() -> None:
    """As with ZeRO-3, parameters have values from a forward pre-hook to a forward hook, and are empty otherwise."""
    torch.manual_seed(0)
    model, tokens = small_gpt()
    wanted = step(model, tokens)
    block = model[2]
    full = [parameter.data for parameter in block.parameters()]
    gathers: list[bool] = []

    def gather(*_: Any) -> None:
        gathers.append(recomputing())
        for parameter, data in zip(block.parameters(), full, strict=True):
            parameter.data = data.clone()  # in other memory than before

    def release(*_: Any) -> None:
        assert not recomputing()  # the forward hook of the block itself
        for parameter in block.parameters():
            parameter.data = torch.empty(0)

    block.register_forward_pre_hook(gather)
    block.register_forward_hook(release)
    for way in ("block", "selective"):
        apply_recompute(model, way)
        gathers.clear()
        found = step(model, tokens)
        assert gathers == [False, True]
        assert_same(found, wanted)


def test_hooks_detect_the_recomputation() -> None:
    model, tokens = small_gpt()
    inside = calls_counted(model[1].attention.qkv)
    apply_recompute(model, "block")
    step(model, tokens)
    assert inside == [False, True]
    assert not recomputing()


def test_a_batch_norm_counts_a_batch_once() -> None:
    model, images = small_resnet()
    apply_recompute(model, "block")
    step(model, images)
    assert {
        int(module.num_batches_tracked) for module in model.modules() if isinstance(module, nn.BatchNorm2d)
    } == {1}


@pytest.mark.parametrize("size", [1, 1 << 19])  # copies of large buffers are kept only if they change
@pytest.mark.parametrize("way", ["block", "selective"])
def test_modules_of_a_block_share_a_buffer(way: Any, size: int) -> None:
    class Count(nn.Module):
        def __init__(self, count: Tensor) -> None:
            super().__init__()
            self.register_buffer("count", count)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x

    class Scale(nn.Module):
        def __init__(self, count: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0.5, 1, 4))
            self.register_buffer("count", count)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight * self.count[0]).tanh()

    count = torch.ones(size)
    model = nn.Sequential(nn.Sequential(Count(count), Scale(count)), nn.Linear(4, 1))
    wanted, x = copy.deepcopy(model), torch.linspace(-1, 1, 8).view(2, 4)
    apply_recompute(model, way)
    for _ in range(2):
        for each in (model, wanted):
            each(x).sum().backward()
        for found, expected in zip(model.parameters(), wanted.parameters(), strict=True):
            assert found.grad is not None and torch.equal(found.grad, expected.grad)
    assert float(count[0]) == 3 and model[0][0].count is model[0][1].count is count


def test_a_block_that_changes_its_input_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    apply_recompute(model, "block")
    with pytest.raises(RuntimeError, match=r"block '1' \(ReLU\) changes its input in place.*inplace=False"):
        model(torch.randn(1, 2))


class Overwritten(nn.Module):
    """Linear layers whose outputs the module overwrites; the caller overwrites the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(F.leaky_relu(self.a(x), inplace=True).sin())
        hidden[:, :2].mul_(2)  # through a view
        return self.c(hidden.sin())


def test_overwritten_products_are_recomputed() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Overwritten(), Overwritten()])
    x = torch.randn(3, 4)

    def gradients() -> list[Tensor]:
        out = x
        for block in model:
            out = block(out).sin_()
        return list(torch.autograd.grad(out.sum(), list(model.parameters())))

    wanted = gradients()
    apply_recompute(model, "selective")
    for _ in range(2):
        assert all(torch.equal(*pair) for pair in zip(gradients(), wanted, strict=True))


def test_a_block_with_other_operations_in_the_recomputation_is_an_error() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.linear(x).sin()] * (2 if recomputing() else 1)).cos()

    model = nn.Sequential(Fickle())
    apply_recompute(model, "block")
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        model(torch.randn(1, 4)).sum().backward()


def test_copies_and_pickles_are_not_wrapped() -> None:
    model, tokens = small_gpt(dropout=0.0)
    wanted = model(tokens)
    apply_recompute(model, "block")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {type(module) for module in twin} == {type(module) for module in small_gpt()[0]}
        assert torch.equal(twin(tokens), wanted)
    assert "Recompute" in str(vars(model[1]))


def test_the_choice_is_reported() -> None:
    model, tokens = small_gpt()
    plain = apply_recompute(model, "none", example=tokens)
    assert (
        plain.modules == {}
        and plain.before == plain.after == saved_bytes(model, tokens).total
        and plain.flops == 0
    )
    chosen = apply_recompute(model, "attention", example=tokens)
    assert chosen.modules == {f"{n}.attention": "attention" for n in (1, 2)}
    assert chosen.before == plain.before and chosen.after == saved_bytes(model, tokens).total < chosen.before
    blocks = apply_recompute(model, "block", example=tokens)
    selective = apply_recompute(model, "selective", example=tokens)
    assert blocks.after < selective.after < chosen.after and blocks.flops > selective.flops == 0
    assert apply_recompute(model, "selective").before is None


@pytest.mark.parametrize(
    ("mode", "more", "words"),
    [
        (
            "blocks",
            {},
            "recompute='blocks' is unknown; expected one of none, block, selective, attention, auto",
        ),
        ("attention", {}, "pass example="),
        ("auto", {"budget_bytes": 1}, "measure blocks in a dry run: pass example="),
        ("auto", {"example": True}, "needs budget_bytes"),
        ("block", {"budget_bytes": 1}, "only recompute='auto' uses budget_bytes"),
        ("block", {"loss": torch.sum}, "pass example="),
        ("auto", {"example": True, "budget_bytes": -1}, "expected budget_bytes of at least 0"),
    ],
)
def test_invalid_arguments_are_refused(mode: Any, more: dict[str, Any], words: str) -> None:
    model, tokens = small_gpt()
    if "example" in more:
        more = {**more, "example": tokens}
    with pytest.raises(ValueError, match=words):
        apply_recompute(model, mode, **more)


# ---- the choice of "auto" ----


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


def test_an_impossible_budget_is_refused_with_the_minimum() -> None:
    model, tokens = small_gpt()
    least = apply_recompute(model, "block", example=tokens).after
    assert least is not None
    with pytest.raises(ValueError, match=rf"use at least budget_bytes={least}, or a smaller example"):
        apply_recompute(model, "auto", example=tokens, budget_bytes=least - 1)
    assert not any("_farandole_wrappers" in vars(module) for module in model.modules())
    assert apply_recompute(model, "auto", example=tokens, budget_bytes=least).after == least


OPTIONS = st.fixed_dictionaries(
    {way: st.builds(Option, st.integers(-5, 50), st.integers(0, 9)) for way in ("selective", "block")}
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPTIONS, max_size=4))
def test_choices_save_increasing_amounts_up_to_the_maximum(options: list[dict[str, Option]]) -> None:
    blocks = {str(index): ways for index, ways in enumerate(options)}
    before = 0
    for saved, ways in cheapest_first(blocks):
        assert saved == sum(blocks[name][way].saved for name, way in ways.items()) > before
        before = saved
    everything = product(*([Option(0, 0), *ways.values()] for ways in options))
    assert before == max(sum(option.saved for option in some) for some in everything)


def test_the_first_choice_saves_most_per_operation() -> None:
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
