"""Loss functions that use parameters directly: the result of one process, or an error that names the parameter and
`weight_decay`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.plan import Plan
from tests.parallel.plans import build, inputs_of

BATCHES = 4
"""The number of micro-batches in a step, which replicas share."""

Parameters = Mapping[str, nn.Parameter]

PENALTIES: dict[str, Callable[[Any, Parameters], Tensor]] = {
    "all": lambda model, _: torch.stack([p.square().sum() for p in model.parameters()]).sum(),
    "norm": lambda _, named: named["1.norm_attention.weight"].square().sum(),
    "qkv": lambda _, named: named["1.attention.qkv.weight"].norm(),
    "tokens": lambda _, named: named["0.tokens.weight"].abs().sum(),
    "router": lambda _, named: named["1.feed_forward.router.weight"].square().sum(),
    "experts": lambda _, named: named["1.feed_forward.experts.down.weight"].square().sum(),
    "module": lambda model, _: model[3](torch.arange(32.0).view(1, 2, 16)).square().mean(),
}
"""Terms of the loss that do not depend on the model's output."""

LLAMA = ["all", "norm", "qkv", "tokens"]

CASES: list[tuple[Plan, str, set[str]]] = [
    *((Plan(data=2, zero=zero), "farandole", set[str]()) for zero in range(4)),
    (Plan(data=2, zero=3), "gloo", {"all", "norm", "qkv", "tokens", "router", "experts"}),
    (Plan(tensor=2), "farandole", {"all", "qkv", "tokens", "router", "experts"}),
    (Plan(tensor=2, sequence=True), "farandole", {"all", "norm", "qkv", "tokens", "router", "experts"}),
    (Plan(context=2), "farandole", set()),
    (Plan(context=2, zero=3, ring=2), "farandole", set()),
    (Plan(expert=2), "farandole", {"all", "experts"}),
    (Plan(data=2, tensor=2, zero=1), "farandole", {"all", "qkv", "tokens", "router", "experts"}),
    (Plan(context=2, expert=2), "farandole", {"all", "experts"}),
    (Plan(pipeline=2), "farandole", {*LLAMA}),
]
"""Plans, and the terms that they refuse; they compute the other terms exactly."""


def _kinds(plan: Plan) -> list[str]:
    if plan.pipeline > 1:
        return LLAMA
    # with sequence parallelism, blocks receive shards of tokens
    return [kind for kind in PENALTIES if kind != "module" or not plan.sequence]


def _inputs(batch: Any) -> dict[str, Tensor]:
    return {"inputs": batch[0], "targets": batch[1]}


@functools.cache
def _alone(name: str, kind: str) -> tuple[float, float, float]:
    """Return the loss, the norm of the gradient, and the loss in evaluation mode, in one process."""
    model = build(name)
    named = dict(model.named_parameters())

    def loss_of_all() -> Tensor:
        pairs = [
            model(tokens, None, targets)
            for tokens, targets in map(partial(inputs_of, name, 0), range(BATCHES))
        ]
        return sum(total + 0.3 * PENALTIES[kind](model, named) for total, _ in pairs) / sum(
            count for _, count in pairs
        )

    loss = loss_of_all()
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    model.eval()
    return loss.item(), norm.item(), loss_of_all().item()


def _with_term(kind: str, model: nn.Module, named: Parameters, errors: list[str]) -> Any:
    """Return a loss function that adds a term, or omits the term if it raises an error, which `errors` records."""

    def loss(output: Any, _: Any) -> Any:
        total, count = output
        try:
            return total + 0.3 * PENALTIES[kind](model, named), count
        except RuntimeError as refused:
            errors.append(str(refused))
            return output

    return loss


def _train(
    rank: int, size: int, name: str, plan: Plan, kinds: list[str]
) -> list[tuple[float, float, float] | str]:
    """Return the loss, the norm and the loss in evaluation mode, or the error, for each term."""
    model = build(name)
    named = dict(model.named_parameters())
    engine = farandole.parallelize(model, plan)
    mine = range(BATCHES)[engine.mesh.replica_of(rank) :: engine.mesh.replicas]
    batches, found = [inputs_of(name, 0, number) for number in mine], []
    for kind in kinds:
        errors: list[str] = []
        loss = _with_term(kind, model, named, errors)
        step = engine.forward_backward(batches, loss, _inputs)
        norm = engine.gradient_norm()
        engine.zero_grad()
        mean = engine.evaluate(batches, loss, _inputs)
        assert step.count == 60
        error: str = max(
            engine.comm.all_gather_object("".join(errors[-1:]))
        )  # the last stage of a pipeline computes the loss
        found.append(error or (step.loss, norm, mean))
    engine.close()
    return found


def _describe(plan: Plan, backend: str) -> str:
    names = ("data", "tensor", "sequence", "context", "expert", "pipeline", "zero")
    return " ".join([backend, *(f"{n}={v}" for n in names if (v := getattr(plan, n)) != getattr(Plan(), n))])


@pytest.mark.parametrize(
    ("plan", "backend", "refused"), CASES, ids=[_describe(plan, backend) for plan, backend, _ in CASES]
)
def test_a_term_of_parameters_is_exact_or_refused(
    ranks: Any, plan: Plan, backend: str, refused: set[str]
) -> None:
    name, kinds = "llama" if plan.pipeline > 1 else "mixtral", _kinds(plan)
    size = (plan.data or 1) * plan.ranks_per_sample * plan.expert
    for results in ranks(size, backend).run(_train, name, plan, kinds):
        for kind, result in zip(kinds, results, strict=True):
            if kind in refused:
                assert isinstance(result, str), kind
                assert re.search(r"(weight|gate_up|down): .* weight_decay", result)
            else:
                assert result == pytest.approx(_alone(name, kind), rel=1e-4), kind


def _plain_loop(rank: int, size: int, plan: Plan, folder: Path) -> tuple[float, float]:
    """Check when parameters are hidden in a plain loop; return the loss and the norm of two passes of the model."""
    model: Any = build("llama")
    complete = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model[1].attention.qkv.weight
    engine = farandole.parallelize(model, plan)
    part = weight.detach().clone()
    features: list[Tensor] = []
    handle = model[2].register_forward_hook(lambda _, args, output: features.append(output))
    tokens, targets = inputs_of("llama", 0, 0)

    def check(hidden: bool) -> None:
        if hidden:
            with pytest.raises(RuntimeError, match=r"sum of 1\.attention\.qkv\.weight: .*\.edit_parameters"):
                weight.sum()
        else:
            assert torch.equal(weight, part)

    check(False)
    engine(tokens)  # without a backward pass
    check(True)
    engine.save(folder / "checkpoint")
    check(False)
    engine(tokens)
    state = engine.state_dict()
    assert all(torch.equal(value, complete[name]) for name, value in state.items())
    engine(tokens)
    engine.load(folder / "checkpoint")
    with torch.no_grad():
        engine(tokens)
    check(False)
    features.clear()
    engine(tokens)
    features.pop().square().sum().backward()  # without the model's output
    check(False)
    engine.zero_grad()
    first, count = engine(tokens, None, targets)
    check(True)
    second, _ = engine(tokens.flip(1), None, targets)
    check(True)
    loss = (first + second) / count
    loss.backward()
    check(False)
    norm = engine.gradient_norm()
    handle.remove()
    engine.close()
    return loss.item(), norm


@pytest.mark.parametrize(
    "plan", [Plan(tensor=2, recompute="selective"), Plan(tensor=2, recompute="block", zero=3)]
)
def test_parameters_are_hidden_between_the_passes_of_a_plain_loop(
    ranks: Any, tmp_path: Path, plan: Plan
) -> None:
    model = build("llama")
    tokens, targets = inputs_of("llama", 0, 0)
    (first, count), (second, _) = model(tokens, None, targets), model(tokens.flip(1), None, targets)
    loss = (first + second) / count
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for found in ranks(2).run(_plain_loop, plan, tmp_path):
        assert found == pytest.approx((loss.item(), norm.item()), rel=1e-4)
