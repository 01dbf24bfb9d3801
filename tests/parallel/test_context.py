"""Context parallelism: ranks that share sequences give the losses, gradients and weights of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.rotary import Rotary
from farandole.models.sequence import SequenceInfo
from farandole.plan import Plan, PlanError
from tests.parallel.plans import alone, build, compare, inputs_of, train

PLANS = [
    Plan(context=2, ring=1),
    Plan(context=2, ring=2),
    Plan(context=4),
    Plan(context=4, ring=4),
    Plan(context=3, ring=3),
    Plan(context=2, ring=2, zero=3),
    Plan(context=2, ring=2, recompute="block"),
]


@pytest.mark.parametrize("name", ["gpt", "llama", "uneven", "mixtral", "deepseek"])
def test_ranks_that_share_sequences_train_as_one_process(ranks: Any, name: str) -> None:
    expected = alone(ranks, name)
    for plan in PLANS:
        if (name == "uneven" and plan.ring == 1) or (name != "gpt" and plan.zero):
            continue  # 3 key-value heads
        compare(ranks(plan.context).run(train, name, plan), expected, name, plan, plan.context)


@pytest.mark.parametrize("name", ["uneven", "deepseek"])
def test_tensor_parallel_ranks_with_different_numbers_of_heads_have_the_same_positions(
    ranks: Any, name: str
) -> None:
    plan = Plan(tensor=2 if name == "uneven" else 3, context=2)  # 2 and 1 heads, or 2, 1 and 1
    expected = alone(ranks, name)
    compare(ranks(plan.ranks_per_sample).run(train, name, plan), expected, name, plan, plan.ranks_per_sample)


def _documents(step: int) -> Tensor:
    lengths = torch.tensor([[3, 5, 1, 14], [10, 1, 1, 11]])[
        :, torch.randperm(4, generator=torch.Generator().manual_seed(step))
    ]
    return torch.stack([torch.arange(4).repeat_interleave(row) for row in lengths])


def _attend(rank: int, size: int, plan: Plan, window: int | None, packed: bool) -> tuple[list[float], Tensor]:
    """Return the losses and the logits of a plain loop over logits, with documents and a sliding window."""
    model = build("llama")
    for module in model.modules():
        if hasattr(module, "window"):
            module.window = window
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.2))
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 29, (2, 23), generator=generator)
        info = SequenceInfo(documents=_documents(step) if packed else None)
        logits = engine(tokens, info)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return losses, logits.detach()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_packed_documents_and_windows(ranks: Any, packed: bool, window: int | None) -> None:
    expected, logits = ranks(1).run(_attend, Plan(), window, packed)[0]
    for plan in (Plan(context=2), Plan(context=2, ring=2), Plan(context=4, ring=2), Plan(context=4, ring=4)):
        for losses, found in ranks(plan.context).run(_attend, plan, window, packed):
            assert losses == pytest.approx(expected, rel=1e-5)
            torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)


def _refused(rank: int, size: int, name: str, plan: Plan, dropout: float) -> str:
    model: nn.Module = build(name)
    for module in model.modules():
        if hasattr(module, "head_width"):
            module.dropout = dropout
    with pytest.raises(PlanError) as error:
        farandole.parallelize(model, plan)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "plan", "dropout", "expected"),
    [
        ("bert", Plan(context=2), 0.0, "expected a decoder-only Transformer, got BERT"),
        ("gpt", Plan(context=2), 0.1, "attention dropout is not supported, got 0.1"),
        (
            "uneven",
            Plan(context=2, ring=1),
            0.0,
            "3 heads cannot be split over 2 ranks; nearest plan: ring=2",
        ),
    ],
)
def test_unsupported_models_are_refused(
    ranks: Any, name: str, plan: Plan, dropout: float, expected: str
) -> None:
    for message in ranks(2).run(_refused, name, plan, dropout):
        assert expected in message


def _short(rank: int, size: int) -> None:
    engine = farandole.parallelize(build("gpt"), Plan(context=2))
    with pytest.raises(ValueError, match="expected at least 2 positions"):
        engine(inputs_of("gpt", 0, 0)[0][:, :1])
    engine.close()


def test_a_sequence_shorter_than_the_axis_is_refused(ranks: Any) -> None:
    ranks(2).run(_short)


def _mismatched(rank: int, size: int) -> None:
    engine = farandole.parallelize(build("gpt"), Plan(context=2))
    tokens, targets = inputs_of("gpt", 0, 0)
    for count in (8, 10):
        other = torch.zeros(2, count, dtype=torch.int64)
        infos = {"documents": SequenceInfo(documents=other), "positions": SequenceInfo(other[0])}
        for name, info in infos.items():
            with pytest.raises(ValueError, match=rf"\(2, 9\) do not match {name} .*{count},?\): expected"):
                engine(tokens, info, targets)
        with pytest.raises(ValueError, match=rf"\(2, 9\) do not match targets \(2, {count}\): expected"):
            engine(tokens, None, other)
    engine(tokens, None, targets)
    engine.close()


def test_arguments_with_another_number_of_positions_are_refused(ranks: Any) -> None:
    ranks(2).run(_mismatched)


def _refused_scaling(rank: int, size: int, rotary: Rotary) -> str:
    model = build_llama(LlamaConfig(20, 1, 2, 16, 8, rotary=rotary))
    with pytest.raises(PlanError) as error:
        farandole.parallelize(model, Plan(context=2))
    return str(error.value)


@pytest.mark.parametrize("options", [{}, {"short_factors": (1.0,) * 4, "long_factors": (2.0,) * 4}])
def test_positions_that_depend_on_the_length_are_refused(ranks: Any, options: dict[str, Any]) -> None:
    scaling = "longrope" if options else "dynamic"
    rotary = Rotary(8, scaling=scaling, original=16, **options)
    for message in ranks(2).run(_refused_scaling, rotary):
        assert f"{scaling} RoPE scaling is not supported" in message
