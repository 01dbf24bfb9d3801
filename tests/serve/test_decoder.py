"""A step in one call of the C core gives the results of the model's modules."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from farandole import native
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.sequence import Transformer
from farandole.native import VectorLevel
from farandole.serve.runner import Runner, Span
from farandole.serve.store import STORES
from tests.serve.models import CONTEXT, LAYERS, engine_of, models, vocabulary

FUSED = ("llama", "mistral", "qwen3")


def qwen2() -> Transformer:
    """Return a Qwen 2 with biases, a window in one of two layers, and sizes that are not multiples of a vector."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocabulary=101, layers=2, heads=6, kv_heads=2, width=42, inner=300, head_width=10, attention_bias=True,
        out_bias=True, feed_forward_bias=True, tied=True, windows=(None, 5),
    )  # fmt: skip
    model = build_llama(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model.eval()


def model_of(family: str) -> Transformer:
    return qwen2() if family == "qwen2" else copy.deepcopy(models(family)[1])


def steps(runner: Runner, store: str, counts: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of steps with a number of tokens per sequence."""
    choose = random.Random(5)
    memory = STORES[store](runner.memory(), 8 * CONTEXT if store == "pages" else 1024)
    blocks = [memory.add([0], CONTEXT) for _ in counts[0]]
    done, found = [0] * len(blocks), []
    for step in counts:
        spans = []
        for number, count in enumerate(step):
            own = blocks[number]
            assert own is not None
            memory.reserve(own, done[number] + count)
            tokens = [choose.randrange(runner.vocabulary) for _ in range(count)]
            if count:
                spans.append(Span(tokens, done[number], own.numbers, min(count, number + 1)))
            done[number] += count
            own.stored = done[number]
        with torch.inference_mode():
            found.append(runner.run(memory.memory, spans))
    return found


STEPS = [[9, 1, 30, 0], [1, 20, 1, 3], [1, 1, 1, 1], [0, 1, 0, 0]]


@pytest.mark.parametrize("weights", ["", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FUSED, "qwen2"])
def test_the_logits_are_those_of_the_modules(family: str, dtype: torch.dtype, weights: str) -> None:
    runner = Runner(model_of(family).to(dtype), weights=weights)
    runner._max_fused_rows = None
    by_modules = Runner(model_of(family).to(dtype), weights=weights)
    assert runner._fused is not None
    by_modules._fused = None
    for store in STORES:
        for found, expected in zip(steps(runner, store, STEPS), steps(by_modules, store, STEPS), strict=True):
            scale = float(expected.abs().max())
            tolerance = (2e-5 if dtype == torch.float32 else 0.05) * scale
            if weights and dtype == torch.float32:  # activations are rounded to 16 bits
                tolerance *= 10
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", [level.name for level in VectorLevel])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_logits_do_not_depend_on_the_batch(level: str, threads: int) -> None:
    core = native.library()
    if core.frd_use_vector_level(VectorLevel[level]) != VectorLevel[level]:
        pytest.skip(f"this processor has no {level}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for weights in ("", "int8"):
            runner = Runner(qwen2(), weights=weights)
            together = steps(runner, "pages", [[7, 40, 13, 1], [1, 1, 1, 30]])
            alone = steps(runner, "slots", [[7, 0, 0, 0]])
            assert torch.equal(together[0][:1], alone[0])
    finally:
        torch.set_num_threads(before)
        core.frd_use_vector_level(max(VectorLevel))


@pytest.mark.parametrize("family", LAYERS)
def test_which_models_are_computed_in_one_call(family: str) -> None:
    runner = engine_of(family).runner
    assert (runner._fused is not None) == (family in FUSED)
    assert Runner(models(family)[1], use_core=False)._fused is None
    assert vocabulary(family) == runner.vocabulary
