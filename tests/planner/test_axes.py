"""Plans that split the model: memory and communication follow from the split model, for dense models and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farandole.models.deepseek import deepseek
from farandole.models.gpt import GPTConfig, gpt
from farandole.models.mixtral import MixtralConfig, mixtral
from farandole.plan import Plan, PlanError
from farandole.planner.estimate import estimate
from farandole.planner.workload import Machine, Workload
from tests.parallel.plans import DEEPSEEK

GPT = GPTConfig(vocabulary=1000, context=64, layers=3, heads=4, width=64)
MIXTRAL = MixtralConfig(1000, 2, 4, 64, 96, kv_heads=2, experts=8, top=2)
MACHINE = Machine(memory=1 << 30, bandwidth=1e9)
LOSS = 2 * 8
"""The bytes of the all-reduce of a loss and its number of targets in fp64."""


def _workload(model: Any) -> Workload:
    tokens = torch.empty(2, 64, dtype=torch.int64, device="meta")
    return Workload(model=model, example=(tokens, None, tokens), loss=lambda output: output[0])


def _parts(model: nn.Module, plan: Plan, ranks: int) -> dict[str, int]:
    workload = _workload(model)
    return estimate(model, plan, ranks, example=workload.example, loss=workload.loss, machine=MACHINE).parts


def _with_meta(build: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build(config)
    return model


def test_a_tensor_parallel_rank_stores_its_part() -> None:
    model = _with_meta(gpt, GPT)
    whole, half = _parts(model, Plan(), 1), _parts(model, Plan(tensor=2), 2)
    norms = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    outputs = sum(
        p.nbytes for name, p in model.named_parameters() if name.endswith(("out.bias", "down.bias"))
    )
    assert half["weights"] == (whole["weights"] - norms - outputs) // 2 + norms + outputs
    assert half["activations"] < whole["activations"]
    shared = _parts(model, Plan(tensor=2, sequence=True), 2)
    assert shared["weights"] == half["weights"]
    assert shared["activations"] < half["activations"]


def test_the_communication_matches_the_collectives() -> None:
    """Two all-reduces per layer and pass, one for the embedding, one for the gradient at the head, and the loss."""
    workload = _workload(_with_meta(gpt, GPT)).split(Plan(tensor=4), 4)
    sent = workload.trace(Plan(tensor=4)).sent
    hidden = 2 * 64 * 64 * 4
    statistics = 3 * 2 * 2 * 64 * 4  # to each of 3 ranks, 2 numbers for each position
    assert sent.keys() == {(0, 1, 2, 3)}
    assert sent[0, 1, 2, 3] == pytest.approx((4 * GPT.layers + 2) * 2 * 3 / 4 * hidden + statistics)


def test_a_ring_passes_keys_and_values_on() -> None:
    """Keys and values circulate in both passes, and their gradients in the backward pass."""
    plan = Plan(context=2, ring=2)
    sent = _workload(_with_meta(gpt, GPT)).split(plan, 2).trace(plan).sent
    keys = 2 * 32 * 64 * 4  # of this rank, which has half of the positions
    circulating = 2 * keys + 2 * keys  # in the first of two steps of each pass
    gradients = 2 * 2 * keys  # in both steps
    assert sent == {(0, 1): pytest.approx(GPT.layers * (circulating + gradients) + LOSS)}


def test_heads_are_exchanged_within_a_ring() -> None:
    plan = Plan(context=2, ring=1)
    sent = _workload(_with_meta(gpt, GPT)).split(plan, 2).trace(plan).sent
    hidden = 2 * 32 * 64 * 4  # of this rank, of which one half is sent
    assert sent == {(0, 1): pytest.approx(GPT.layers * 2 * 4 * hidden / 2 + LOSS)}


def test_an_expert_parallel_rank_stores_some_experts() -> None:
    model = _with_meta(mixtral, MIXTRAL)
    whole, part = _parts(model, Plan(), 1), _parts(model, Plan(expert=4), 4)
    experts = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    assert part["weights"] == whole["weights"] - experts * 3 // 4


def test_ranks_that_share_sequences_store_their_positions() -> None:
    model = _with_meta(gpt, GPT)
    whole, half = _parts(model, Plan(), 1), _parts(model, Plan(context=2), 2)
    assert half["weights"] == whole["weights"]
    assert 0.45 * whole["activations"] < half["activations"] < 0.6 * whole["activations"]


def test_a_model_with_predictions_and_latent_attention() -> None:
    model = _with_meta(deepseek, DEEPSEEK)
    tokens = torch.empty(2, 16, dtype=torch.int64, device="meta")
    plan = Plan(tensor=2, expert=2, sequence=True, zero=1)

    def loss(output: tuple[Tensor, int]) -> Tensor:
        return output[0]

    found = estimate(model, plan, 4, example=(tokens, None, tokens), loss=loss, machine=MACHINE)
    assert found.parts["weights"] > 0
    assert found.times["communication"] > 0
    with pytest.raises(PlanError, match="nearest plan"):
        estimate(model, Plan(expert=8), 8, example=(tokens, None, tokens), loss=loss, machine=MACHINE)
