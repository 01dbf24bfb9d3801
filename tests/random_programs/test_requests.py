"""Random requests, computed together in a random engine, give the results that each gives alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from farandole.serve.engine import GenerationEngine
from farandole.serve.folder import read_model
from farandole.serve.request import Output, Sampling
from farandole.serve.runner import Runner
from farandole.serve.speculation.draft import DraftModel
from tests.random_programs.seeds import seeds
from tests.serve.server import write_folder

REQUESTS, CONTEXT = 30, 200

CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "[a-z ]{3,30}"},
    {"regex": "(ab|cd)+"},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"grammar": 'start: /[0-9]+/ ("," /[a-c]/)*'},
]


@dataclass(frozen=True)
class Model:
    """A model of a folder, with two random LoRA adapters."""

    found: Any
    runner: Runner

    def engine(self, **options: Any) -> GenerationEngine:
        end = {"tokenizer": self.found.tokenizer, "end_tokens": self.found.end_tokens}
        return GenerationEngine(self.runner, context=CONTEXT, **end, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    found = read_model(write_folder(tmp_path_factory.mktemp("model")))
    generator = torch.Generator().manual_seed(0)

    def adapter() -> dict[str, Any]:
        layers = {name: layer for name, layer in found.model.named_modules() if isinstance(layer, nn.Linear)}
        return {
            name: (
                0.5 * torch.randn(2, layer.in_features, generator=generator),
                0.5 * torch.randn(layer.out_features, 2, generator=generator),
            )
            for name, layer in layers.items()
        }

    return Model(found, Runner(found.model, adapters={"first": adapter(), "second": adapter()}))


def random_prompt(choose: random.Random, vocabulary: int) -> list[int]:
    """Return a prompt that shares a prefix with other prompts, repeats a few tokens, or is random."""
    kind, length = choose.choice(["shared", "repeated", "random"]), choose.randint(1, 60)
    if kind == "shared":
        common = random.Random(0).choices(range(vocabulary), k=60)
        return common[:length] + choose.choices(range(vocabulary), k=choose.randrange(4))
    if kind == "repeated":
        return (choose.choices(range(vocabulary), k=3) * 20)[:length]
    return choose.choices(range(vocabulary), k=length)


def random_sampling(choose: random.Random, vocabulary: int) -> Sampling:
    def sometimes(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if choose.random() < 0.25}

    tokens = choose.choice([0, 1, 2, 5, 20, 40])
    ending: list[dict[str, Any]] = [
        {},
        {"min_tokens": choose.randint(0, tokens)},
        {"ignore_eos": True},
        choose.choice(CONSTRAINTS),
    ]
    return Sampling(
        max_tokens=tokens,
        temperature=choose.choice([0, 0, 0.8, 1.5]),
        seed=choose.randrange(5),
        **sometimes(
            n=choose.choice([2, 3]),
            logprobs=choose.choice([0, 3]),
            prompt_logprobs=True,
            stop=tuple(choose.sample(["a", "th", "e ", "\n", "in", " "], 2)),
            stop_token_ids=tuple(choose.choices(range(vocabulary), k=10)),
            repetition_penalty=choose.choice([0.8, 1.2]),
            frequency_penalty=0.5,
            presence_penalty=1.0,
            logit_bias={choose.randrange(vocabulary): choose.choice([-100.0, 3.0, 20.0]) for _ in range(3)},
            top_k=choose.choice([1, 5, 50]),
            top_p=0.7,
            min_p=0.1,
            lora=choose.choice(["first", "second"]),
        ),
        **choose.choice(ending),
    )


def random_engine(choose: random.Random, model: Model) -> GenerationEngine:
    running = choose.choice([2, 4, 8])
    speculate = choose.choice(["off", "lookup", "draft"])
    draft = (
        DraftModel(Runner(model.found.model), choose.choice([40, CONTEXT])) if speculate == "draft" else None
    )
    return model.engine(
        max_running=running,
        token_budget=choose.choice([running, 16, 64]),
        kv_positions=choose.choice([256, 512, 1024]),
        store=choose.choice(["pages", "slots"]),
        speculate=speculate,
        draft=draft,
    )


Results = dict[int, Output]
"""The output of each sequence of a request."""


def add(results: Results, output: Output) -> None:
    one = replace(output, request=0)
    results[output.choice] = results[output.choice].joined(one) if output.choice in results else one


def alone(engine: GenerationEngine, prompt: list[int], sampling: Sampling) -> Results:
    engine.add(prompt, sampling)
    results: Results = {}
    while engine.has_work:
        for output in engine.step():
            add(results, output)
    return results


@pytest.mark.parametrize("seed", seeds(4))
def test_each_request_alone(model: Model, seed: int) -> None:
    choose = random.Random(seed)
    vocabulary = model.runner.vocabulary
    reference = model.engine(max_running=1, token_budget=64, kv_positions=512)
    engine = random_engine(choose, model)
    requests = [
        (random_prompt(choose, vocabulary), random_sampling(choose, vocabulary)) for _ in range(REQUESTS)
    ]
    running: dict[int, tuple[list[int], Sampling]] = {}
    found: dict[int, Results] = {}
    while requests or engine.has_work:
        while requests and choose.random() < 0.5:
            prompt, sampling = requests.pop()
            number = engine.add(prompt, sampling)
            running[number], found[number] = (prompt, sampling), {}
        if running and choose.random() < 0.05:
            number = choose.choice(list(running))
            engine.cancel(number)
            del running[number]
        for output in engine.step():
            add(found[output.request], output)
        for number in [number for number in running if not engine.has_request(number)]:
            prompt, sampling = running.pop(number)
            assert found[number] == alone(reference, prompt, sampling), (prompt, sampling)
    engine.check_idle()
