"""Sampling: the distributions of transformers' processors, penalties, and seeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as theirs

from farandole.serve.request import RequestError, Sampling
from farandole.serve.sampling import Sampler, logprobs_of
from tests.serve.models import engine_of, generate, run, tokens_of

VOCABULARY, DRAWS = 12, 3000
LOGITS = torch.tensor([2.0, 1.5, 1.4, 1.0, 0.5, 0.0, -0.2, -0.5, -1.0, -1.5, -2.0, -4.0])

CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain": ({}, []),
    "temperature": ({"temperature": 0.6}, [theirs.TemperatureLogitsWarper(0.6)]),
    "top_k": ({"top_k": 3}, [theirs.TopKLogitsWarper(3)]),
    "top_p": ({"top_p": 0.7}, [theirs.TopPLogitsWarper(0.7)]),
    "min_p": ({"min_p": 0.3}, [theirs.MinPLogitsWarper(0.3)]),
    "all": (
        {"temperature": 1.7, "top_k": 8, "top_p": 0.8, "min_p": 0.2},
        [
            theirs.TemperatureLogitsWarper(1.7),
            theirs.TopKLogitsWarper(8),
            theirs.TopPLogitsWarper(0.8),
            theirs.MinPLogitsWarper(0.2),
        ],
    ),
}


def test_distributions_are_those_of_transformers() -> None:
    sampler = Sampler(VOCABULARY, DRAWS * len(CASES))
    draws = [
        sampler.add(Sampling(seed=seed, **parameters), 0, [1], [])
        for parameters, _ in CASES.values()
        for seed in range(DRAWS)
    ]
    found = torch.tensor(sampler.draw(LOGITS.repeat(len(draws), 1), draws)).view(len(CASES), DRAWS)
    for tokens, (name, (_, processors)) in zip(found, CASES.items(), strict=True):
        scores = LOGITS[None].clone()
        for processor in processors:
            scores = processor(torch.tensor([[1]]), scores)
        expected = scores.softmax(-1)[0]
        frequency = torch.bincount(tokens, minlength=VOCABULARY) / DRAWS
        assert frequency[expected == 0].sum() == 0, name
        deviation = (expected * (1 - expected) / DRAWS).sqrt()
        assert ((frequency - expected).abs() <= 5 * deviation).all(), name


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 2**31 - 1},
        {"top_p": 1e-50},
        {"min_p": 1e-50},
        {"temperature": 1e-50},
        {"repetition_penalty": 100},
    ],
    ids=str,
)
def test_extreme_values_give_tokens(parameters: dict[str, Any]) -> None:
    sampler = Sampler(VOCABULARY, 2)
    draws = [sampler.add(each, 0, [1], []) for each in (Sampling(**parameters), Sampling(temperature=0))]
    token, greedy = sampler.draw(LOGITS.repeat(2, 1), draws)
    assert 0 <= token < VOCABULARY and greedy == 0
    if "top_p" in parameters or "temperature" in parameters:
        assert token == 0


def test_undefined_logits_do_not_affect_other_sequences() -> None:
    sampler = Sampler(VOCABULARY, 2)
    draws = [sampler.add(Sampling(top_k=1), 0, [1], []) for _ in range(2)]
    token, other = sampler.draw(torch.stack([LOGITS * torch.nan, LOGITS]), draws)
    assert 0 <= token < VOCABULARY and other == 0


def test_values_out_of_range_are_refused() -> None:
    for name, value in (("top_k", 2**31), ("repetition_penalty", 0.001), ("repetition_penalty", torch.inf)):
        with pytest.raises(RequestError, match=f"{name}: expected a value from"):
            Sampling(**{name: value})
    engine = engine_of("llama")
    every = Sampling(min_tokens=1, stop_token_ids=range(engine.vocabulary))
    with pytest.raises(RequestError, match="min_tokens: expected 0, because every token ends the sequence"):
        engine.add([1], every)


def test_penalties_and_biases() -> None:
    sampler = Sampler(VOCABULARY, 4)
    parameters = [
        {"repetition_penalty": 2.7},
        {"presence_penalty": 0.73, "frequency_penalty": 0.41},
        {"logit_bias": {11: 50.0}},
        {},
    ]
    prompt = [0, 9]
    draws = [sampler.add(Sampling(temperature=0, **each), 0, prompt, []) for each in parameters]
    generated: list[list[int]] = [[] for _ in draws]
    processor = theirs.RepetitionPenaltyLogitsProcessor(2.7)
    for _ in range(8):
        tokens = sampler.draw(LOGITS.repeat(4, 1), draws)
        expected = processor(torch.tensor([prompt + generated[0]]), LOGITS[None].clone())
        counts = torch.bincount(torch.tensor(generated[1], dtype=torch.int64), minlength=VOCABULARY)
        penalized = LOGITS - 0.73 * (counts > 0) - 0.41 * counts
        assert tokens == [int(expected.argmax()), int(penalized.argmax()), 11, 0]
        for own, token in zip(generated, tokens, strict=True):
            own.append(token)
    assert len(set(generated[0])) > 1 < len(set(generated[1]))


def test_seats_are_reused_without_old_penalties() -> None:
    sampler = Sampler(VOCABULARY, 1)
    for _ in range(2):
        draw = sampler.add(Sampling(temperature=0, presence_penalty=2.0), 0, [5], [])
        assert [sampler.draw(LOGITS[None].clone(), [draw]) for _ in range(2)] == [[0], [1]]
        sampler.remove(draw)


def test_logprobs_are_of_the_model() -> None:
    (found,) = logprobs_of(LOGITS[None], [3], 2)
    expected = LOGITS.log_softmax(-1)
    assert found.logprob == pytest.approx(expected[3].item())
    assert [token for token, _ in found.top] == [0, 1]


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    parameters = {"max_tokens": 20, "temperature": 1.2, "top_p": 0.9, "seed": 5}
    alone = tokens_of(generate(engine_of("llama"), [1, 2, 3], **parameters))
    engine = engine_of("llama", token_budget=16)
    for other in range(6):
        engine.add([other] * (other + 1), Sampling(max_tokens=other + 3, seed=other, presence_penalty=1.0))
    number = engine.add([1, 2, 3], Sampling(**parameters))
    assert tokens_of(run(engine)[number, 0]) == alone
    assert tokens_of(generate(engine, [1, 2, 3], **{**parameters, "seed": 6})) != alone


def test_choices_differ() -> None:
    engine = engine_of("llama")
    number = engine.add([1, 2, 3], Sampling(max_tokens=12, n=3, temperature=1.5))
    found = run(engine)
    assert len({tuple(tokens_of(found[number, choice])) for choice in range(3)}) == 3
