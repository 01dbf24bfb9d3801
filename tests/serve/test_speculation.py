"""Speculative decoding: the results without it, bit by bit, and proposals only where they pay."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import farandole
from farandole.models.sequence import Transformer
from farandole.serve.engine import GenerationEngine
from farandole.serve.metrics import Metrics, prometheus_text
from farandole.serve.request import Output, RequestError, Sampling
from farandole.serve.runner import Runner
from farandole.serve.speculation.draft import DraftModel
from farandole.serve.speculation.ngrams import NgramProposer
from farandole.serve.speculation.speculator import PROBE_STEPS, Speculator
from farandole.serve.store import STORES
from tests.models.hf.folders import add_tokenizer
from tests.serve.models import CONTEXT, LAYERS, engine_of, generate, models, run, tokens_of, vocabulary
from tests.serve.server import write_folder


class AlwaysPropose(Speculator):
    """Proposes a random number of tokens, whatever they cost."""

    choose = random.Random(0)

    def _counts(self, candidates: Any, decoding: int, step: Any, budget: int) -> list[int]:
        counts: list[int] = []
        for each in candidates:
            counts.append(min(self.choose.randint(1, 8), each.limit, budget - sum(counts)))
        return counts


def speculating(engine: GenerationEngine) -> GenerationEngine:
    """Let an engine propose tokens in all steps."""
    assert engine._speculator is not None
    engine._speculator = AlwaysPropose(engine._speculator._proposer)
    return engine


def draft_options(model: Transformer, context: int = CONTEXT) -> dict[str, Any]:
    return {"speculate": "draft", "draft": DraftModel(Runner(model), context)}


def traffic(engine: GenerationEngine, prompts: list[list[int]], **options: Any) -> list[list[Output]]:
    """Add requests at random steps, and return the outputs of each."""
    choose, found = random.Random(len(prompts)), {}
    left = list(enumerate(prompts))
    numbers = []
    while left or engine.has_work:
        if left and choose.random() < 0.5:
            number, prompt = left.pop(0)
            numbers.append(
                engine.add(prompt, Sampling(max_tokens=8 + 3 * number, logprobs=20, seed=number, **options))
            )
        for output in engine.step():
            found.setdefault(output.request, []).append(output)
        engine.store.check()
    engine.check_idle()
    return [found[number] for number in numbers]


def joined(outputs: list[Output], choice: int = 0) -> Output:
    """Return the outputs of one sequence as one, without the request's number."""
    own = [output for output in outputs if output.choice == choice]
    return replace(reduce(Output.joined, own), request=0)


def prompts_of(family: str) -> list[list[int]]:
    """Return prompts that repeat themselves, and that do not."""
    choose, size = random.Random(family), vocabulary(family)
    return [
        [*choose.choices(range(size), k=length)] * times
        for length, times in ((3, 6), (1, 1), (20, 1), (5, 3), (2, 10), (30, 1))
    ]


class Informed(NgramProposer):
    """Proposes the tokens of known results, with errors."""

    def __init__(self, prompts: list[list[int]], results: list[list[Output]], size: int) -> None:
        self.known = [
            [*prompt, *tokens_of([each for each in outputs if each.choice == choice])]
            for prompt, outputs in zip(prompts, results, strict=True)
            for choice in {output.choice for output in outputs}
        ]
        self.size, self.choose = size, random.Random(1)

    def backlog(self, state: Any) -> int | None:
        return 0

    def propose(self, states: Any, counts: Any) -> list[list[int]]:
        found = []
        for state, count in zip(states, counts, strict=True):
            end = len(state.tokens)
            known = next(each for each in self.known if each[:end] == state.tokens)
            own = [*known[end : end + count], *[0] * count][:count]
            found.append(
                [self.choose.randrange(self.size) if self.choose.random() < 0.2 else token for token in own]
            )
        return found


def check_results(family: str, engine: GenerationEngine, plain: GenerationEngine, **parameters: Any) -> None:
    """Compare the results of requests with and without speculation, with the engine's proposer and with good
    proposals."""
    prompts = prompts_of(family)
    expected = traffic(plain, prompts, **parameters)
    for proposer in (engine._speculator._proposer, Informed(prompts, expected, vocabulary(family))):  # type: ignore[union-attr]
        engine._speculator = AlwaysPropose(proposer)
        engine.metrics = Metrics()
        found = traffic(engine, prompts, **parameters)
        for own, other in zip(found, expected, strict=True):
            for choice in range(parameters.get("n", 1)):
                assert joined(own, choice) == joined(other, choice)
    assert (
        engine.metrics.proposed_tokens / 3 < engine.metrics.accepted_tokens < engine.metrics.proposed_tokens
    )


@pytest.mark.parametrize(("family", "store"), [("llama", "slots"), *((family, "pages") for family in LAYERS)])
def test_greedy_results_are_bitwise_those_without_speculation(family: str, store: str) -> None:
    options: dict[str, Any] = {"store": store, "max_running": 3, "token_budget": 40}
    engine = engine_of(family, **options, speculate="lookup")
    check_results(family, engine, engine_of(family, **options), temperature=0)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_draft_model(layers: int, store: str) -> None:
    options: dict[str, Any] = {"store": store, "max_running": 3, "token_budget": 40}
    draft = models("llama", num_hidden_layers=layers)[1]
    engine = engine_of("llama", **options, **draft_options(draft, 40))  # the draft model's context is shorter
    prompts = prompts_of("llama")
    expected = traffic(engine_of("llama", **options), prompts, temperature=0)
    found = traffic(speculating(engine), prompts, temperature=0)
    assert [joined(each) for each in found] == [joined(each) for each in expected]
    metrics = engine.metrics
    if layers == 2:  # the same model
        assert 50 < metrics.accepted_tokens == metrics.proposed_tokens
    else:
        assert metrics.accepted_tokens < metrics.proposed_tokens


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 5, "min_p": 0.05},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
        {"temperature": 0.7, "presence_penalty": 1.0, "n": 2},
        {"temperature": 0, "logit_bias": {3: 4.0}, "min_tokens": 6, "stop_token_ids": [3, 4, 5]},
        {"temperature": 0, "prompt_logprobs": True},
    ],
)
def test_sampled_results_are_those_without_speculation(parameters: dict[str, Any]) -> None:
    """The tokens are equal for each seed, so their distribution is that without speculation."""
    options: dict[str, Any] = {"max_running": 4, "token_budget": 64, "end_tokens": [1]}
    draft = draft_options(models("llama", num_hidden_layers=1)[1])
    check_results(
        "llama", engine_of("llama", **options, **draft), engine_of("llama", **options), **parameters
    )


def test_cancelled_requests_free_the_memory_of_the_draft_model() -> None:
    engine = speculating(engine_of("llama", max_running=3, **draft_options(models("llama")[1])))
    numbers = [engine.add([number] * 20, Sampling(max_tokens=30, temperature=0)) for number in range(3)]
    for _ in range(3):
        engine.step()
    engine.cancel(numbers[1])
    engine.step()
    assert sorted(number for number, _ in run(engine)) == [numbers[0], numbers[2]]
    assert engine._speculator is not None
    store = engine._speculator._proposer._store  # type: ignore[attr-defined]
    store.check()
    assert store.used == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


def test_stop_strings_and_constraints(folder: Path) -> None:
    parameters: list[dict[str, Any]] = [
        {"max_tokens": 60, "temperature": 0},
        {"max_tokens": 40, "regex": r"(red|blue)( red| blue){8,20}", "temperature": 0.8},
        {"max_tokens": 60, "temperature": 0, "json_schema": {"type": "array", "items": {"type": "integer"}}},
    ]
    prompts = ["say red red red red red", "two dog two dog two dog"]
    plain = farandole.LLM(folder)
    text = plain.generate(prompts[:1], max_tokens=60, temperature=0)[0].text
    parameters.append({**parameters[0], "stop": (text[20:23],)})
    for options in ({"speculate": "lookup"}, {"speculate": "draft", "draft": folder}):
        llm = farandole.LLM(folder, **options)
        speculating(llm.engine)
        for each in parameters:
            expected, found = (own.generate(prompts, seed=5, logprobs=3, **each) for own in (plain, llm))
            assert found == expected
        assert llm.engine.metrics.accepted_tokens


def test_draft_models_with_other_tokens_are_refused(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path)
    add_tokenizer(other, 290)
    with pytest.raises(
        RequestError, match=r"draft: expected the vocabulary of the served model, but token '.*' has the ID"
    ):
        farandole.LLM(folder, speculate="draft", draft=other)
    with pytest.raises(RequestError, match="draft: expected a draft model with speculate='draft'"):
        farandole.LLM(folder, speculate="draft")
    with pytest.raises(RequestError, match="draft: expected no draft model with speculate='lookup'"):
        farandole.LLM(folder, speculate="lookup", draft=folder)
    with pytest.raises(RequestError, match="speculate: expected one of off, lookup, draft, got 'ngram'"):
        farandole.LLM(folder, speculate="ngram")


# ---- proposals ----


def test_the_tokens_after_the_last_occurrence_are_proposed() -> None:
    proposer = NgramProposer()
    tokens = [1, 2, 3, 9, 1, 2, 3, 7, 5, 2, 3]
    state = proposer.add(tokens, 100)
    assert proposer.backlog(state) == 0
    assert proposer.propose([state], [3]) == [[7, 5, 2]]
    tokens.append(9)  # 3 9 is longer ago, and 2 3 9 is longer
    assert proposer.propose([state], [4]) == [[1, 2, 3, 7]]
    tokens.append(8)
    assert proposer.backlog(state) is None
    tokens += [4, 6, 4, 6]
    assert proposer.propose([state], [5]) == [[4, 6, 4, 6, 4]]


class Counter(NgramProposer):
    """A proposer that is always ready, with a cost."""

    def __init__(self, base: float = 0.0, tokens: int = 0) -> None:
        self._base, self._tokens = base, tokens

    def backlog(self, state: Any) -> int | None:
        return self._tokens

    def seconds(self) -> tuple[float, float, float]:
        return self._base, 0.0, 1.0

    def propose(self, states: Any, counts: Any) -> list[list[int]]:
        return [[7] * count for count in counts]


def lengths(rate: float, sequences: int, base: float, proposer: Counter, budget: int = 256) -> list[int]:
    """Return the number of tokens that are proposed after many verifications with an acceptance rate."""
    speculator = Speculator(proposer)
    speculations = [speculator.add([1], 100) for _ in range(sequences)]
    for number in range(200):
        for each in speculations:
            speculator.observe(each, 1, int((number + 1) * rate + 1e-9) - int(number * rate + 1e-9))
    found = speculator.propose(speculations, [99] * sequences, (base, 1.0), budget)
    return [len(each) for each in found]


def test_proposals_follow_the_measured_costs() -> None:
    # a step of one sequence takes 21 units, and each token 1 unit
    assert lengths(1.0, 1, 20, Counter()) == [16]
    assert 1 <= lengths(0.5, 1, 20, Counter())[0] < 16
    assert lengths(0.0, 1, 20, Counter()) == [0]
    # 16 sequences keep the processor busy: a step takes 36 units, and a token must have a chance of 16 / 36
    assert min(lengths(1.0, 16, 20, Counter())) > 8
    assert max(lengths(0.3, 16, 20, Counter())) == 0
    # without a common cost, only certain tokens would pay
    assert lengths(0.9, 4, 0.1, Counter()) == [0] * 4
    # a pass of a draft model must pay, too
    assert lengths(0.5, 1, 20, Counter(base=1.0))[0] <= lengths(0.5, 1, 20, Counter())[0]
    assert lengths(0.9, 1, 20, Counter(base=25.0)) == [0]
    assert lengths(0.9, 1, 20, Counter(tokens=4000)) == [0]
    assert lengths(0.9, 1, 20, Counter(tokens=20))[0] > 4
    # a gain below 10 % is not enough
    assert lengths(0.5, 16, 20, Counter()) == [0] * 16
    assert sum(lengths(1.0, 16, 20, Counter(), budget=5)) == 5


def test_the_acceptance_is_measured_again() -> None:
    speculator = Speculator(Counter())
    speculations = [speculator.add([1], 100) for _ in range(3)]
    for each in speculations:
        for _ in range(50):
            speculator.observe(each, 4, 0)
    steps = [speculator.propose(speculations, [9] * 3, (20.0, 1.0), 256) for _ in range(3 * PROBE_STEPS + 1)]
    probes = [proposals for proposals in steps if any(proposals)]
    assert sorted(probes) == [[[], [], [7]], [[], [7], []], [[7], [], []]]


def test_verified_tokens_enter_the_step_times() -> None:
    engine = engine_of("llama", speculate="lookup")
    speculating(engine)
    generate(engine, [1, 2] * 10, max_tokens=30, temperature=0)
    assert engine.metrics.steps < 30
    assert engine.admission._most_decodes > 2
    families = engine.metrics.families(
        running=0, waiting=0, used=0, capacity=1, moves=0, limit=1, step=(0.0, 0.0, 0.0)
    )
    assert "farandole_accepted_tokens_total" in prometheus_text(families)
    assert tokens_of([Output(0, 0, (1,)).joined(Output(0, 0, (2,)))]) == [1, 2]
