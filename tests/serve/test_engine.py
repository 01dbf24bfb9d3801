"""The generation engine: tokens as from transformers, memory, and refusals."""

from __future__ import annotations

import random

import pytest
import torch

from farandole import native
from farandole.serve.engine import GenerationEngine, QueueFullError
from farandole.serve.request import RequestError, Sampling
from farandole.serve.store import STORES, LayerShape, Memory, PageStore, SlotStore
from farandole.serve.threads import thread_count
from tests.models.hf.families import folder_of, reference, with_rope
from tests.serve.models import (
    CONTEXT,
    LAYERS,
    engine_of,
    generate,
    greedy,
    models,
    run,
    tokens_of,
    vocabulary,
)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("family", LAYERS)
def test_greedy_tokens_are_those_of_transformers(family: str, store: str) -> None:
    choose = random.Random(family)
    size = vocabulary(family)
    prompts = [[choose.randrange(size) for _ in range(length)] for length in (1, 30, 5, 17)]
    engine = engine_of(family, store=store, token_budget=16, max_running=3)
    numbers = [engine.add(prompt, Sampling(max_tokens=12, temperature=0)) for prompt in prompts]
    found = run(engine)
    for number, prompt in zip(numbers, prompts, strict=True):
        outputs = found[number, 0]
        assert tokens_of(outputs) == greedy(family, prompt, 12)
        assert outputs[-1].finish_reason == "length"


def test_prompt_logprobs_are_those_of_transformers() -> None:
    theirs, _ = models("llama")
    prompt = random.Random(1).choices(range(vocabulary("llama")), k=21)
    engine = engine_of("llama", token_budget=16)
    (output,) = generate(engine, prompt, max_tokens=0, prompt_logprobs=True, logprobs=2)
    assert (output.tokens, output.finish_reason) == ((), "length")
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [each.token for each in output.prompt_logprobs] == prompt[1:]
    for row, each in zip(expected, output.prompt_logprobs, strict=False):
        assert each.logprob == pytest.approx(row[each.token].item(), abs=1e-4)
        values, indices = row.topk(2)
        assert [token for token, _ in each.top] == indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_new_request_joins_at_the_next_step() -> None:
    engine = engine_of("gpt2")
    engine.add([1, 2, 3], Sampling(max_tokens=20, temperature=0))
    engine.step()
    late = engine.add([4, 5], Sampling(max_tokens=20, temperature=0))
    assert late in {output.request for output in engine.step()}


def test_a_long_prompt_does_not_delay_running_requests() -> None:
    engine = engine_of("gpt2", token_budget=4, max_running=4)
    first = engine.add([1, 2, 3], Sampling(max_tokens=30, temperature=0))
    engine.step()
    engine.add([1] * 40, Sampling(max_tokens=2, temperature=0))
    for _ in range(10):
        assert [output.request for output in engine.step()] == [first]


def test_end_tokens_stop_tokens_and_minimum_tokens() -> None:
    expected = greedy("llama", [5, 6], 12)
    end = expected[4]
    first = expected.index(end)
    engine = engine_of("llama", end_tokens=[end])
    outputs = generate(engine, [5, 6], max_tokens=12, temperature=0)
    assert (tokens_of(outputs), outputs[-1].finish_reason) == (expected[: first + 1], "stop")
    outputs = generate(engine, [5, 6], max_tokens=12, temperature=0, ignore_eos=True)
    assert (tokens_of(outputs), outputs[-1].finish_reason) == (expected, "length")
    outputs = generate(engine_of("llama"), [5, 6], max_tokens=12, temperature=0, stop_token_ids=[expected[0]])
    assert tokens_of(outputs) == expected[:1]
    outputs = generate(engine, [5, 6], max_tokens=12, min_tokens=8, temperature=0)
    assert len(outputs) >= 8
    assert end not in tokens_of(outputs)[:7]


def test_requests_that_do_not_fit_are_refused() -> None:
    engine = engine_of("gpt2", kv_positions=32)
    for prompt, parameters, field, message in (
        ([], {}, "prompt", "at least one token"),
        ([vocabulary("gpt2")], {}, "prompt", "expected tokens from 0 to"),
        ([1] * CONTEXT, {}, "prompt", "does not fit in the context"),
        ([1] * 10, {"max_tokens": CONTEXT}, "max_tokens", "does not fit in the context of 64 tokens"),
        ([1] * 20, {"max_tokens": 20}, "max_tokens", "39 token positions do not fit in the KV cache"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias", "got -1"),
        ([1], {"stop": ["a"]}, "stop", "no tokenizer"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            engine.add(prompt, Sampling(**parameters))
        assert caught.value.field == field
    for name, value in (
        ("temperature", -1),
        ("top_p", 0),
        ("min_p", 2),
        ("n", 0),
        ("logprobs", 99),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("min_tokens", 17),
    ):
        with pytest.raises(RequestError, match=f"{name}: expected"):
            Sampling(**{name: value})
    assert not engine.has_work


@pytest.mark.parametrize("name", ["max_running", "max_waiting"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_of_no_sequences_is_refused(name: str, value: int) -> None:
    with pytest.raises(RequestError, match=f"{name}: expected at least 1 sequence, got {value}"):
        engine_of("llama", **{name: value})


def test_a_full_queue_is_refused() -> None:
    engine = engine_of("gpt2", max_waiting=3)
    engine.add([1], Sampling(n=2))
    with pytest.raises(QueueFullError, match="waiting sequences .currently 2."):
        engine.add([1], Sampling(n=2))
    engine.add([1])


@pytest.mark.parametrize("store", STORES)
def test_little_memory_delays_requests_but_loses_none(store: str) -> None:
    engine = engine_of("gpt2", store=store, kv_positions=512 if store == "slots" else 64)
    numbers = [engine.add([number + 1] * 20, Sampling(max_tokens=10, temperature=0)) for number in range(7)]
    most = 0
    found = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request, []).append(output)
        most = max(most, engine.running)
    assert most == 2
    for number in numbers:
        assert tokens_of(found[number]) == greedy("gpt2", [number + 1] * 20, 10)


def test_models_whose_results_depend_on_the_batch_are_refused(tmp_path) -> None:
    from farandole.models.hf import from_pretrained

    folder = folder_of(reference("llama", 1, **with_rope("llama", "dynamic")), tmp_path)
    with pytest.raises(RequestError, match="scaling='dynamic' depend on the length"):
        GenerationEngine(from_pretrained(folder), context=CONTEXT)
    with pytest.raises(RequestError, match="expected one of slots, pages, got 'ring'"):
        engine_of("gpt2", store="ring")
    with pytest.raises(RequestError, match="expected at least max_running=16, got 3"):
        engine_of("gpt2", token_budget=3)


# ---- stores ----

SHAPES = [LayerShape(2, 3, 5, torch.float32)]


def test_compaction_moves_the_fewest_sequences() -> None:
    store = SlotStore(Memory(SHAPES), 10 * 256)
    added = [store.add([1], 40) for _ in range(8)]
    for number, blocks in enumerate(added):
        store.reserve(blocks, 33)
        store.memory.values[0][blocks.numbers[0], :, :33] = number
        store.memory.keys[0][blocks.numbers[0], :, :3] = number
        store.commit(blocks, [1], 33)
    for number in (1, 2, 6, 7):  # two holes below the four that remain
        store.release(added[number])
    store.compact()
    assert store.moves == 2
    assert sorted(added[number].numbers[0] for number in (0, 3, 4, 5)) == [0, 1, 2, 3]
    for number in (0, 3, 4, 5):
        (slot,) = added[number].numbers
        assert (store.memory.values[0][slot, :, :33] == number).all()
        assert (store.memory.keys[0][slot, :, :3] == number).all()
    store.check()


def test_slots_grow_in_chunks() -> None:
    store = SlotStore(Memory(SHAPES), 2048)
    blocks = store.add([1], 600)
    lengths = []
    for length in (1, 256, 257, 600):
        store.reserve(blocks, length)
        lengths.append(store.block_length)
    assert lengths == [256, 256, 512, 768]
    assert store.add([1], 600) is not None
    assert store.add([1], 600) is None  # three slots of 768 do not fit


def test_slots_do_not_exceed_the_capacity_after_many_short_sequences() -> None:
    store = SlotStore(Memory(SHAPES), 16 * 256)
    short = [store.add([1], 200) for _ in range(16)]
    for blocks in short:
        store.reserve(blocks, 200)
        store.commit(blocks, [1], 200)
    store.memory.values[0][0, :, :200] = 7
    for blocks in short[1:]:
        store.release(blocks)
    store.compact()
    long = store.add([1], 2048)
    store.reserve(long, 2048)
    assert store.blocks * store.block_length <= store.capacity
    assert (store.memory.values[0][0, :, :200] == 7).all()
    store.check()


@pytest.mark.parametrize("store", STORES)
def test_a_sequence_that_never_fits_is_refused(store: str) -> None:
    engine = engine_of("gpt2", store=store, kv_positions=300, context=512)
    with pytest.raises(RequestError, match="prompt: 301 token positions do not fit"):
        engine.add([1] * 301, Sampling(max_tokens=1))
    longest = engine.store.capacity
    assert longest == (256 if store == "slots" else 288)
    with pytest.raises(RequestError, match=f"do not fit in the KV cache of {longest} positions"):
        engine.add([1] * longest, Sampling(max_tokens=2))
    assert engine.check([1] * longest, Sampling(max_tokens=1)) == 1
    assert engine.store.add([1] * longest, longest) is not None


@pytest.mark.parametrize(("store", "least"), [("slots", 256), ("pages", 16)])
def test_a_cache_without_room_for_a_block_is_refused(store: str, least: int) -> None:
    with pytest.raises(RequestError, match=f"kv_positions: expected at least {least} positions"):
        engine_of("gpt2", store=store, kv_positions=least - 1)
    assert engine_of("gpt2", store=store, kv_positions=least).store.capacity == least


def test_the_default_cache_uses_at_most_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    each = engine_of("llama").runner.bytes_per_position
    for free, expected in ((2 * each * 256 * 3 + 1, 3 * 256), (1 << 40, 2 * 256)):
        monkeypatch.setattr("farandole.serve.engine.available_memory", lambda free=free: free)
        assert engine_of("llama", max_running=4 if free < 1 << 40 else 2).store.capacity == expected
    monkeypatch.setattr("farandole.serve.engine.available_memory", lambda: each)
    with pytest.raises(RequestError, match="kv_positions: expected memory for at least 256 token positions"):
        engine_of("llama")


def test_pages_with_the_same_tokens_are_shared() -> None:
    engine = engine_of("llama", max_running=2)
    prompt = random.Random(2).choices(range(vocabulary("llama")), k=40)
    alone = tokens_of(generate(engine, prompt, max_tokens=6, temperature=0))
    assert (engine.metrics.prompt_tokens, engine.metrics.shared_tokens) == (40, 0)
    assert tokens_of(generate(engine, prompt, max_tokens=6, temperature=0)) == alone
    assert (engine.metrics.prompt_tokens, engine.metrics.shared_tokens) == (48, 32)
    other = [*prompt[:16], *reversed(prompt[16:])]
    assert tokens_of(generate(engine, other, max_tokens=6, temperature=0)) == greedy("llama", other, 6)
    assert engine.metrics.shared_tokens == 48


def test_pages_are_reused_from_the_oldest() -> None:
    store = PageStore(Memory(SHAPES), 64)
    for start in range(3):  # each takes two of four pages
        blocks = store.add(list(range(start, start + 32)), 32)
        store.reserve(blocks, 32)
        store.commit(blocks, list(range(start, start + 32)), 32)
        store.release(blocks)
        store.check()
    for start, shared in ((0, 0), (1, 16), (2, 16)):
        blocks = store.add(list(range(start, start + 32)), 32)
        assert blocks.stored == shared
        store.release(blocks)
        store.check()


@pytest.mark.skipif(not native.available(), reason="the C core is not compiled")
def test_the_threads_of_torch_do_not_compete_with_those_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    seen = []
    run = engine.runner.run
    monkeypatch.setattr(
        engine.runner, "run", lambda *a: seen.append((torch.get_num_threads(), thread_count())) or run(*a)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        engine.add([1, 2, 3], Sampling(max_tokens=1))
        engine.step()
        assert (seen, torch.get_num_threads(), thread_count()) == ([(1, 3)], 3, 3)
    finally:
        torch.set_num_threads(before)
