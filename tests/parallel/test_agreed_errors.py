"""Errors that one rank finds are raised on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole
from farandole.parallel.axes import Position
from farandole.parallel.zero.sharding import box_mesh
from farandole.plan import Plan, PlanError
from tests.parallel.plans import build


def _one_fails(rank: int, size: int, what: str) -> tuple[str, str]:
    """Return the type and the message of the error; the model of rank 1 alone is not supported."""
    model: nn.Module = build("llama")
    plan = Plan(context=2)
    if what == "attention dropout":
        if rank == 1:
            model[1].attention.dropout = 0.1  # type: ignore[index, union-attr]
    elif what == "type":
        plan = Plan(zero=1)
        if rank == 1:
            model[1].to(torch.bfloat16)  # type: ignore[index, operator]
    elif what == "shared memory":
        plan = Plan(zero=1)
        if rank == 1:
            norm: Any = model[1].norm_attention  # type: ignore[index]
            norm.weight = nn.Parameter(model[1].norm_feed_forward.weight.detach())  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match="rank 1: ") as error:
        farandole.parallelize(model, plan)
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("attention dropout", "rank 1: context=2: attention dropout is not supported, got 0.1"),
        ("type", "rank 1: precision='fp32' requires fp32 parameters"),
        ("shared memory", "are different parameters that share memory"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(ranks: Any, what: str, expected: str) -> None:
    found = ranks(2).run(_one_fails, what)
    assert found[0] == found[1]
    kind, message = found[0]
    assert kind == ("ValueError" if what == "shared memory" else "PlanError")
    assert expected in message and message.startswith("rank 1: ")


def _all_fail(rank: int, size: int) -> str:
    with pytest.raises(PlanError) as error:
        farandole.parallelize(build("gpt"), Plan(expert=2))
    return str(error.value)


def test_an_error_on_all_ranks_names_no_rank(ranks: Any) -> None:
    for message in ranks(2).run(_all_fail):
        assert message.startswith("expert=2: Transformer has no mixture of experts")


def test_an_axis_over_hosts_whose_ranks_alternate_is_refused() -> None:
    mesh = box_mesh(4, ["a", "b", "b", "a"], tensor=4)
    with pytest.raises(PlanError, match="tensor: ranks 0, 3, 1, 2 share layers"):
        Position(mesh, mesh.of_rank(0)[0], sent=[]).comm("tensor")
