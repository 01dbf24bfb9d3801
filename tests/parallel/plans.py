"""Small models, trained under a plan and compared with one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole
from farandole.models.bert import BERTConfig, build_bert
from farandole.models.deepseek import DeepSeekConfig, LatentAttention, build_deepseek
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.gptj import GPTJConfig, build_gptj
from farandole.models.layers import SelfAttention
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import Balance
from farandole.models.rotary import Rotary
from farandole.models.t5 import T5Config, build_t5
from farandole.plan import Plan

WORDS, STEPS = 29, 2

DEEPSEEK = DeepSeekConfig(
    WORDS, layers=2, heads=4, width=16, inner=24, rotary=Rotary(4), query_rank=8, kv_rank=8, plain_width=4,
    value_width=6, experts=4, expert_inner=10, top=2, dense=1, groups=2, top_groups=1, predicted=1, balance=Balance(loss=0.5),
)  # fmt: skip

MIXTRAL = MixtralConfig(
    WORDS, 2, 4, 16, 20, kv_heads=2, experts=4, top=2, balance=Balance(loss=0.5, z_loss=0.1)
)

MODELS = {
    "gpt": partial(build_gpt, GPTConfig(WORDS, 16, 2, 4, 16, positions="learned")),
    "llama": partial(
        build_llama,
        LlamaConfig(WORDS, 2, 8, 32, 30, kv_heads=2, qk_norm=True, attention_bias=True, tied=True, padding=3),
    ),
    "uneven": partial(build_llama, LlamaConfig(WORDS, 2, 6, 24, 31, kv_heads=3, out_bias=True, padding=20)),
    "gptj": partial(build_gptj, GPTJConfig(WORDS, 2, 4, 16, rotary=2)),
    "mixtral": partial(build_mixtral, MIXTRAL),
    "capacity": partial(build_mixtral, replace(MIXTRAL, balance=Balance(capacity=0.8))),
    "deepseek": partial(build_deepseek, DEEPSEEK),
    "bert": partial(build_bert, BERTConfig(WORDS, 16, 2, 4, 16)),
    "t5": partial(build_t5, T5Config(WORDS, 1, 1, 4, 16, 4, 24, dropout=0.0)),
}


@dataclass(frozen=True)
class Result:
    """The results of a rank: losses, gradient norms, logits, and complete parameters."""

    losses: list[float]
    norms: list[float]
    logits: Tensor
    weights: dict[str, Tensor]
    wrong: list[str]


def inputs_of(name: str, step: int, replica: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(1, WORDS, (2, 9), generator=generator)
    targets = torch.randint(0, WORDS, (2, 9), generator=generator)
    targets[0, :3] = -1
    return ((tokens, tokens.flip(1)) if name == "t5" else tokens), targets


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def train(rank: int, size: int, name: str, plan: Plan, replicas: int = 0, dropout: float = 0.0) -> Result:
    model = build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        elif isinstance(module, SelfAttention | LatentAttention):
            module.dropout = dropout
    torch.manual_seed(7 + rank)
    inputs, targets = inputs_of(name, 0, 0)
    example = {"inputs": inputs, "targets": targets} if plan.recompute in ("attention", "auto") else None
    engine = farandole.parallelize(model, plan, example=example)
    names = {parameter: key for key, parameter in model.named_parameters()}
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), 0.5))
    replica = engine.mesh.replica_of(rank)
    mine = [replica] if size > 1 or not replicas else list(range(replicas))
    losses, norms = [], []
    for step in range(STEPS):
        batches = [inputs_of(name, step, each) for each in mine]
        losses.append(
            engine.forward_backward(
                batches, lambda output, _: output, lambda batch: {"inputs": batch[0], "targets": batch[1]}
            ).loss
        )
        norms.append(engine.clip(0.3))
        optimizer.step()
        optimizer.zero_grad()
    engine.model.eval()
    with torch.no_grad(), engine.whole():
        logits = engine(inputs_of(name, 0, 0)[0])
    weights = {names[p]: value.detach().clone() for p, value in engine.whole_parameters()}
    engine.close()
    return Result(losses, norms, logits, weights, [])


@functools.cache
def alone(ranks: Any, name: str, plan: Plan | None = None, replicas: int = 0, dropout: float = 0.0) -> Result:
    """Return the result of one process."""
    (result,) = ranks(1).run(train, name, plan or Plan(), replicas, dropout)
    return result  # type: ignore[no-any-return]


def compare(results: list[Result], expected: Result, name: str, plan: Plan, size: int) -> None:
    for found in results:
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert found.norms == pytest.approx(expected.norms, rel=1e-4)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
        for key, value in expected.weights.items():
            torch.testing.assert_close(
                found.weights[key],
                value,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda m, k=key: f"{k}: {m}",
            )
