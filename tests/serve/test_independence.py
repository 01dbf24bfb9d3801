"""The promise: a request's greedy tokens, and its logits, do not depend on the other requests, bit by bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole import native
from farandole.serve.request import Output, Sampling
from farandole.serve.rows import IndependentRows, ragged_attention, write_positions
from farandole.serve.store import STORES
from tests.serve.models import LAYERS, engine_of, generate, run, vocabulary


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int  # selects the tokens; equal numbers share a prefix
    length: int
    count: int
    cancelled_after: int | None


ARRIVALS = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt=st.integers(0, 3),
    length=st.integers(1, 40),
    count=st.integers(1, 16),
    cancelled_after=st.none() | st.none() | st.integers(0, 10),
)


def prompt_of(family: str, arrival: Arrival) -> list[int]:
    choose = random.Random(arrival.prompt)
    return [choose.randrange(vocabulary(family)) for _ in range(40)][: arrival.length]


def sampling_of(arrival: Arrival) -> Sampling:
    # the log-probabilities of 20 tokens change if any logit changes
    return Sampling(max_tokens=arrival.count, temperature=0, logprobs=20)


@cache
def alone(family: str, prompt: tuple[int, ...], count: int) -> list[Output]:
    engine = engine_of(family, store="slots", token_budget=64, max_running=1)
    return generate(engine, list(prompt), max_tokens=count, temperature=0, logprobs=20)


@pytest.mark.parametrize("family", LAYERS)
@settings(max_examples=6, deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=8),
    store=st.sampled_from(sorted(STORES)),
    max_running=st.integers(1, 6),
    budget=st.integers(6, 70),
    pages=st.integers(4, 40),
)
def test_random_traffic(
    family: str, arrivals: list[Arrival], store: str, max_running: int, budget: int, pages: int
) -> None:
    positions = pages * 16 if store == "pages" else 256 * pages
    engine = engine_of(
        family, store=store, max_running=max_running, token_budget=budget, kv_positions=positions
    )
    found: dict[int, list[Output]] = {}
    numbers: dict[int, Arrival] = {}
    cancelled = set()
    step = 0
    while engine.has_work or step <= 12:
        for arrival in arrivals:
            if arrival.step == step:
                numbers[engine.add(prompt_of(family, arrival), sampling_of(arrival))] = arrival
        for number, arrival in numbers.items():
            if arrival.cancelled_after is not None and step == arrival.step + arrival.cancelled_after:
                engine.cancel(number)
                cancelled.add(number)
        for output in engine.step():
            found.setdefault(output.request, []).append(output)
        engine.store.check()
        step += 1
    engine.check_idle()
    for number, arrival in numbers.items():
        expected = alone(family, tuple(prompt_of(family, arrival)), arrival.count)
        got = found.get(number, [])
        if number in cancelled:
            expected = expected[: len(got)]
        assert [(each.tokens, each.logprobs, each.finish_reason) for each in got] == [
            (each.tokens, each.logprobs, each.finish_reason) for each in expected
        ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_are_bitwise_equal_in_batches_of_any_size(family: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        prompt = random.Random(7).choices(range(vocabulary(family)), k=48)
        parameters = {"max_tokens": 1, "temperature": 0, "logprobs": 20, "prompt_logprobs": True}
        expected = None
        for others in (0, 1, 5, 15):
            engine = engine_of(family, token_budget=16 if others == 5 else 200)
            for other in range(others):
                engine.add([other + 1] * (3 * other + 1), Sampling(max_tokens=5))
            number = engine.add(prompt, Sampling(**parameters))
            (output,) = run(engine)[number, 0]
            expected = expected or output
            assert (output.prompt_logprobs, output.logprobs) == (expected.prompt_logprobs, expected.logprobs)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("use_core", [True, False])
@pytest.mark.parametrize("inputs", [24, 512, 1376])
@pytest.mark.parametrize("outputs", [3, 97, 300])
def test_products_of_a_row_do_not_depend_on_the_other_rows(inputs: int, outputs: int, use_core: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(70, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    with torch.inference_mode(), IndependentRows(use_core):
        complete = F.linear(x, weight, bias)
        for rows in (1, 2, 3, 7, 16, 17, 33):
            assert torch.equal(F.linear(x[:rows], weight, bias), complete[:rows])
            assert torch.equal(F.linear(x[-rows:], weight, bias), complete[-rows:])
    assert torch.allclose(complete, F.linear(x, weight, bias), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("threads", [1, 3])
def test_activations_of_a_row_do_not_depend_on_the_other_rows(threads: int) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(64, 1375)
        with torch.inference_mode(), IndependentRows():
            for function in (F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), torch.sigmoid):
                complete = function(x)
                for rows in (1, 2, 3, 7, 63):
                    assert torch.equal(function(x[:rows]), complete[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("level", [level.name for level in native.VectorLevel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width", "window"),
    [(4, 4, 64, 64, None), (12, 2, 24, 20, None), (5, 1, 8, 130, 37), (2, 2, 6, 16, 3)],
)
def test_attention_of_the_core(
    heads: int,
    kv_heads: int,
    width: int,
    value_width: int,
    window: int | None,
    dtype: torch.dtype,
    level: str,
) -> None:
    """Compare with torch's attention, for each query alone, with blocks of a page and of a slot."""
    core = native.library()
    if core.frd_use_vector_level(native.VectorLevel[level]) != native.VectorLevel[level]:
        pytest.skip(f"this processor has no {level}")
    try:
        torch.manual_seed(0)
        lengths = [1, 15, 16, 17, 64, 65, 200, 300]
        positions = torch.tensor(lengths) - 1
        query = torch.randn(len(lengths), heads, width)
        key = torch.randn(len(lengths), kv_heads, 304, width).to(dtype)
        value = torch.randn(len(lengths), kv_heads, 304, value_width).to(dtype)
        found = []
        for length in (16, 304):
            blocks = 304 // length * len(lengths)
            table = torch.randperm(blocks).view(len(lengths), -1).int()
            keys = torch.empty(blocks, kv_heads, length // 16, width, 16, dtype=dtype)
            values = torch.empty(blocks, kv_heads, length, value_width, dtype=dtype)
            tiled = key.view(len(lengths), kv_heads, -1, length // 16, 16, width).permute(0, 2, 1, 3, 5, 4)
            keys[table.long()] = tiled
            values[table.long()] = value.view(len(lengths), kv_heads, -1, length, value_width).transpose(1, 2)
            arguments = (query, keys, values, table, positions, 0.3, window)
            found.append(ragged_attention(*arguments, use_core=True))
            one = [
                ragged_attention(
                    query[i : i + 1], keys, values, table[i : i + 1], positions[i : i + 1], 0.3, window
                )
                for i in range(len(lengths))
            ]
            assert torch.equal(torch.cat(one), found[-1])
        assert torch.equal(*found)
        for number, length in enumerate(lengths):
            seen = slice(0 if window is None else max(0, length - window), length)
            expected = F.scaled_dot_product_attention(
                query[number, :, None],
                key[number, :, seen].float().repeat_interleave(heads // kv_heads, 0),
                value[number, :, seen].float().repeat_interleave(heads // kv_heads, 0),
                scale=0.3,
            )
            assert torch.allclose(found[0][number], expected[:, 0], rtol=1e-4, atol=1e-5)
    finally:
        core.frd_use_vector_level(max(native.VectorLevel))


@pytest.mark.parametrize("level", [level.name for level in native.VectorLevel])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_products_of_the_core(level: str, threads: int) -> None:
    core = native.library()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    core.frd_use_vector_level(native.VectorLevel[level])
    try:
        for rows in (0, 1, 5, 6, 7, 12, 13, 40):
            x, weight, bias = torch.randn(rows, 37), torch.randn(101, 37), torch.randn(101)
            with torch.inference_mode(), IndependentRows(True):
                result = F.linear(x, weight, bias)
            assert torch.allclose(result, (x.double() @ weight.double().T + bias).float(), atol=1e-4)
    finally:
        torch.set_num_threads(before)
        core.frd_use_vector_level(max(native.VectorLevel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [16, 48])
def test_keys_and_values_are_stored_as_by_torch(length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 15, 16, 47, 3])
    table = torch.randperm(5 * (48 // length)).view(5, -1).int()
    projected = torch.randn(5, 3, 20, dtype=dtype).transpose(0, 1)  # heads first, not contiguous
    key, value = projected[..., :7].transpose(0, 1), projected[..., 8:].transpose(0, 1)
    stores = []
    for use_core in (True, False):
        keys = torch.zeros(table.numel(), 3, length // 16, 7, 16, dtype=dtype)
        values = torch.zeros(table.numel(), 3, length, 12, dtype=dtype)
        write_positions(key, value, keys, values, table, positions, use_core)
        stores.append((keys, values))
    for one, other in zip(*stores, strict=True):
        assert torch.equal(one, other)
    assert stores[0][1].count_nonzero() == value.numel()
