"""Forward passes under tensor and context parallelism: named arguments, overlapping passes, chunks and dry runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.models import loss
from farandole.models.layers import TransformerBlock
from farandole.models.sequence import SequenceInfo
from farandole.plan import Plan
from tests.parallel.plans import WORDS, alone, build, compare, inputs_of, train


class _NamedCalls(TransformerBlock):
    """A block that passes named arguments."""

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        x = x + self.dropout(input=self.attention(info=info, x=self.norm_attention(x)))
        out: Tensor = x + self.dropout(input=self.feed_forward(x=self.norm_feed_forward(x)))
        return out


def _build_named() -> nn.Module:
    model = build("gpt")
    for block in model.children():
        if isinstance(block, TransformerBlock):
            block.__class__ = _NamedCalls
            block.dropout.p = 0.2
    return model


def _update(model: nn.Module, call: Any, passes: list[tuple[Tensor, Tensor]]) -> None:
    """Run all forward passes, and then one backward pass."""
    torch.manual_seed(5)
    losses = [total / count for total, count in (call(*each) for each in passes)]
    torch.stack(losses).sum().backward()


def _steps(rank: int, size: int, plan: Plan, named: bool, lengths: list[int]) -> dict[str, Tensor]:
    model = _build_named() if named else build("gpt")
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.5))
    _update(model, lambda tokens, targets: engine(tokens, None, targets), _passes(lengths))
    optimizer.step()
    state = engine.state_dict()
    engine.close()
    return state


def _passes(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3 - number, length) for number, length in enumerate(lengths)]
    return [
        (
            torch.randint(0, WORDS, shape, generator=generator),
            torch.randint(0, WORDS, shape, generator=generator),
        )
        for shape in shapes
    ]


def _expected(named: bool, lengths: list[int]) -> dict[str, Tensor]:
    model = _build_named() if named else build("gpt")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    _update(model, lambda tokens, targets: model(tokens, None, targets), _passes(lengths))
    optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("sequence", [False, True])
def test_named_arguments_enter_regions(ranks: Any, sequence: bool) -> None:
    expected = _expected(True, [7])
    for found in ranks(2).run(_steps, Plan(tensor=2, sequence=sequence), True, [7]):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor=2, sequence=True),
        Plan(tensor=2, sequence=True, recompute="block"),
        Plan(tensor=2, sequence=True, recompute="selective"),
        Plan(context=2, recompute="block"),
        Plan(tensor=2, context=2, sequence=True, recompute="block"),
    ],
)
def test_passes_of_different_shapes_overlap(ranks: Any, plan: Plan) -> None:
    lengths = [7, 10, 5]
    expected = _expected(False, lengths)
    for found in ranks(plan.ranks_per_sample).run(_steps, plan, False, lengths):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def _in_chunks(rank: int, size: int, rows: int) -> list[float]:
    """Return losses that are computed in chunks; the ranks' vocabulary shards have different sizes, 15 and 14."""
    tokens, targets = inputs_of("gpt", 0, 0)
    engine = farandole.parallelize(build("gpt"), Plan(tensor=size))
    before, loss.LOGITS_BYTES = loss.LOGITS_BYTES, rows * 15 * 4
    try:
        losses = []
        for train in (True, False):
            with torch.set_grad_enabled(train):
                losses.append(float(engine(tokens, None, targets)[0]))
    finally:
        loss.LOGITS_BYTES = before
        engine.close()
    return losses


def test_ranks_with_different_numbers_of_words_have_equal_chunks(ranks: Any) -> None:
    tokens, targets = inputs_of("gpt", 0, 0)
    expected = build("gpt")(tokens, None, targets)[0].item()
    for losses in ranks(2).run(_in_chunks, 14):
        assert losses == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", Plan(tensor=2, sequence=True, recompute="auto", activation_bytes=60_000)),
        ("llama", Plan(tensor=4, recompute="attention")),
        ("llama", Plan(context=2, ring=2, tensor=2, recompute="attention")),
        ("mixtral", Plan(expert=2, recompute="auto", activation_bytes=60_000)),
    ],
)
def test_a_dry_run_chooses_recomputation(ranks: Any, name: str, plan: Plan) -> None:
    size = plan.tensor * plan.context * plan.expert
    expected = alone(ranks, name, replicas=plan.expert)
    compare(ranks(size).run(train, name, plan), expected, name, plan, size)
