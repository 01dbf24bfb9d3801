"""A trace of few equal blocks predicts the trace of all blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from farandole.models.bert import BERTConfig, build_bert
from farandole.models.deepseek import deepseek
from farandole.models.gpt import GPTConfig, gpt
from farandole.models.llama import LlamaConfig, llama
from farandole.models.meta import meta_device
from farandole.models.mixtral import MixtralConfig, mixtral
from farandole.models.resnet import build_resnet, resnet_config
from farandole.models.t5 import T5Config, build_t5
from farandole.plan import LoRA, Plan
from farandole.planner import repeats, workload
from farandole.planner.repeats import find_runs, shortened
from farandole.planner.trace import Trace
from farandole.planner.workload import Workload
from tests.parallel.plans import DEEPSEEK

LAYERS = 7
MODELS: dict[str, Any] = {
    "gpt": lambda: gpt(GPTConfig(vocabulary=3000, context=64, layers=LAYERS, heads=4, width=64)),
    "llama": lambda: llama(LlamaConfig(3000, LAYERS, 4, 64, 96, kv_heads=2)),
    "llama, large vocabulary": lambda: llama(LlamaConfig(300_000, LAYERS, 4, 32, 96, tied=True)),
    "mixtral": lambda: mixtral(MixtralConfig(1000, LAYERS, 4, 64, 96, kv_heads=2, experts=8, top=2)),
    "deepseek": lambda: deepseek(replace(DEEPSEEK, layers=LAYERS)),
    "bert": lambda: build_bert(BERTConfig(1000, 64, LAYERS, 4, 64)),
    "t5": lambda: build_t5(T5Config(1000, LAYERS, LAYERS - 1, 4, 64, 16, 128)),
}


def _workload(name: str) -> Workload:
    with meta_device():
        model = MODELS[name]()
    tokens = torch.empty(2, 64, dtype=torch.int64, device="meta")
    inputs: Any = (tokens, tokens) if name == "t5" else tokens
    return Workload(model=model, example=(inputs, None, tokens), loss=lambda output: output[0])


def _both(example: Workload, plan: Plan, ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, Trace]:
    part = example.split(plan, ranks)
    assert find_runs(part.model)
    short = part.trace(plan)
    monkeypatch.setattr(workload, "find_runs", lambda model: [])
    return short, part.trace(plan)


BLOCK = Plan(recompute="block", precision="bf16")
CASES = [
    ("gpt", Plan()),
    ("gpt", Plan(recompute="selective")),
    ("gpt", Plan(recompute="attention")),
    ("gpt", Plan(lora=LoRA(targets="*.down"))),
    ("llama", BLOCK),
    ("llama, large vocabulary", BLOCK),
    ("mixtral", Plan()),
    ("deepseek", BLOCK),
    ("bert", Plan()),
    ("t5", Plan()),
    ("t5", BLOCK),
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_few_blocks_predict_all(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    short, complete = _both(_workload(name), plan, 1, monkeypatch)
    assert short == complete


@pytest.mark.parametrize(
    ("name", "plan", "ranks"),
    [
        ("llama", Plan(tensor=2, sequence=True), 4),
        ("llama", Plan(context=4, ring=2, recompute="block"), 4),
        ("mixtral", Plan(expert=4, tensor=2), 8),
        ("deepseek", Plan(expert=2, context=2), 4),
    ],
)
def test_few_blocks_predict_the_communication(
    name: str, plan: Plan, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, complete = _both(_workload(name), plan, ranks, monkeypatch)
    assert short == complete and sum(short.sent.values()) > 0


def test_a_shortened_model_is_restored() -> None:
    with meta_device():
        model = nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(8)), nn.Linear(8, 4))
    (run,) = find_runs(model)
    assert run.names == tuple("12345678")
    before = dict(model.named_modules())
    with shortened({run: 3}):
        assert [name for name, _ in model.named_children()] == list("01234")
        assert model(torch.empty(2, 4, device="meta")).shape == (2, 4)
    assert dict(model.named_modules()) == before


def test_blocks_that_differ_are_not_a_run() -> None:
    with meta_device():
        resnet = build_resnet(resnet_config("resnet18", 10))
        windows = llama(LlamaConfig(100, 8, 4, 64, 96, windows=tuple((None, 16) * 4)))
        some = nn.Sequential(*(nn.Dropout(0.1 if number % 2 else 0.2) for number in range(8)))
    assert repeats.find_runs(resnet) == repeats.find_runs(windows) == repeats.find_runs(some) == []
