"""Routers of all stages are trained, balanced and counted as in one process (`tests.parallel.test_axes` compares
gradients)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.models.deepseek import build_deepseek
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import Balance, routers_of, take_loads
from farandole.models.sequence import SequenceInfo, Transformer
from farandole.parallel.pipeline.stage import Stage
from farandole.parallel.pipeline.transfers import Transfers
from farandole.plan import Plan
from tests.parallel.pipeline.models import batches as batches_of
from tests.parallel.pipeline.models import build as build_plain
from tests.parallel.plans import DEEPSEEK, WORDS

BALANCED = replace(DEEPSEEK, layers=4, predicted=0, balance=Balance())
"""A model whose routers have biases, but no losses."""

STEPS, REPLICAS, COUNT = 3, 2, 3

Loads = dict[str, tuple[Tensor, float]]


def _build() -> Transformer:
    torch.manual_seed(0)
    model = build_deepseek(BALANCED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def _inputs(batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return {"inputs": batch[0], "targets": batch[1]}


def _biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: router.get_buffer("bias").clone() for name, router in routers_of(model).items()}


def _balance(rank: int, size: int, plan: Plan, measured: bool) -> tuple[list[Loads], dict[str, Tensor]]:
    """Return the loads of each step, and the biases of this rank's routers after the last one.

    With `measured`, the blocks are measured before they are divided.
    """
    model = _build()
    example = batches_of("gpt", 9, 0, 1)[0][0] if measured else None
    engine = farandole.parallelize(model, plan, example=example)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    found = []
    for step in range(STEPS):
        samples = batches_of("gpt", step, engine.mesh.replica_of(rank), COUNT)
        engine.forward_backward(samples, lambda output, _: output, _inputs)
        optimizer.step()
        optimizer.zero_grad()
        loads = engine.take_router_loads()
        found.append({name: (load.tokens.clone(), load.imbalance) for name, load in loads.items()})
    biases = _biases(model)
    engine.close()
    return found, biases


def _balance_alone() -> tuple[list[Loads], dict[str, Tensor]]:
    model = _build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(STEPS):
        samples = [b for replica in range(REPLICAS) for b in batches_of("gpt", step, replica, COUNT)]
        parts = [model(**_inputs(batch)) for batch in samples]
        (sum(total for total, _ in parts) / sum(count for _, count in parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        loads = take_loads(model)
        found.append({name: (load.tokens.clone(), load.imbalance) for name, load in loads.items()})
    return found, _biases(model)


def test_routers_of_all_stages_are_balanced_as_in_one_process(ranks: Any) -> None:
    expected, biases = _balance_alone()
    assert len(expected[0]) == 3 and any(bool(bias.any()) for bias in biases.values())
    for plan, measured in (
        (Plan(pipeline=2, expert=2), True),
        (Plan(pipeline=2, expert=2, schedule="gems", zero=1), False),
        (Plan(data=2, pipeline=2, schedule="zb-v"), False),
        (Plan(data=2, pipeline=2, tensor=2, sequence=True), False),
    ):
        size = plan.ranks_per_sample * REPLICAS
        seen = set()
        for found, own in ranks(size).run(_balance, plan, measured):
            for step, loads in enumerate(found):
                assert list(loads) == list(expected[step])
                for name, (tokens, imbalance) in loads.items():
                    assert torch.equal(tokens, expected[step][name][0])
                    assert imbalance == expected[step][name][1]
            for name, bias in own.items():
                torch.testing.assert_close(bias, biases[name], rtol=1e-6, atol=0)
            seen |= set(own)
        assert seen == set(biases)


def _scaled(rank: int, size: int) -> list[tuple[float, float]]:
    """Return the loss and the norm of the router gradients of this rank, for two multiples of the model's loss."""
    found = []
    for factor in (1.0, 3.0):
        torch.manual_seed(0)
        model = build_mixtral(
            MixtralConfig(WORDS, 4, 2, 8, 12, experts=4, top=2, balance=Balance(loss=0.5, z_loss=0.1))
        )
        engine = farandole.parallelize(model, Plan(pipeline=size))
        step = engine.forward_backward(
            batches_of("gpt", 0, 0, COUNT), lambda output, _, f=factor: (f * output[0], output[1]), _inputs
        )
        norm = engine.gradient_norm()
        metric = engine.evaluate(batches_of("gpt", 0, 0, COUNT), lambda output, _: output, _inputs)
        assert metric < step.loss  # evaluations have no router losses
        found.append((step.loss, norm))
        engine.close()
    return found


def test_a_multiple_of_the_loss_has_a_multiple_of_the_router_losses(ranks: Any) -> None:
    for (loss, norm), (scaled_loss, scaled_norm) in ranks(2).run(_scaled):
        assert scaled_loss == pytest.approx(3 * loss, rel=1e-6)
        assert scaled_norm == pytest.approx(3 * norm, rel=1e-5)


class _Pair(nn.Module):
    """A block with two outputs."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, info: SequenceInfo) -> tuple[Tensor, None]:
        return self.block(x, info), None


def test_router_losses_of_blocks_with_several_outputs_are_refused() -> None:
    model = build_mixtral(MixtralConfig(WORDS, 2, 2, 8, 12, experts=4, balance=Balance(loss=0.5)))
    model[1] = _Pair(model[1])
    tokens, targets = batches_of("gpt", 0, 0, 1)[0]
    with pytest.raises(TypeError, match="router losses between stages: expected a tensor"):
        Stage(model, 0, range(2), [1, 2]).run(None, (tokens, None, targets), {})


def _sent(rank: int, size: int, sequence: bool) -> int:
    """Return the elements that this rank sends to other stages."""
    sent = 0
    plain = Transfers._send

    def send(transfers: Transfers, tensor: Tensor, peer: int, tag: int) -> None:
        nonlocal sent
        if tensor.is_floating_point():
            sent += tensor.numel()
        plain(transfers, tensor, peer, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfers, "_send", send)
        model = build_plain("llama")
        engine = farandole.parallelize(model, Plan(pipeline=2, tensor=2, sequence=sequence))
        engine.forward_backward(batches_of("llama", 0, 0, COUNT), lambda output, _: output, _inputs)
        engine.close()
    return sent


def test_stages_exchange_shards_of_the_tokens(ranks: Any) -> None:
    whole, shards = (ranks(4).run(_sent, sequence) for sequence in (False, True))
    for stage in range(2):
        own = slice(2 * stage, 2 * stage + 2)
        assert sum(shards[own]) * 2 == sum(whole[own]) > 0
