"""The GPT: parameter count, initial loss, causality, tied weights and generation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from farandole.models.attention import attention
from farandole.models.generate import generate
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.layers import TransformerBlock
from farandole.models.loss import next_token_loss
from farandole.models.sequence import SequenceInfo

SMALL = GPTConfig(vocabulary=97, context=16, layers=2, heads=2, width=8)


@pytest.mark.parametrize("config", [SMALL, GPTConfig(11, 5, 1, 1, 4), GPTConfig(50257, 1024, 12, 12, 768)])
def test_parameter_count(config: GPTConfig) -> None:
    with torch.device("meta"):
        model = build_gpt(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters


def test_gpt2_small_has_124_million_parameters_minus_positions() -> None:
    assert GPTConfig(50257, 1024, 12, 12, 768).parameters == 124_439_808 - 1024 * 768  # openai's gpt2


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model = build_gpt(SMALL)
    tokens = torch.randint(0, SMALL.vocabulary, (64, SMALL.context))
    loss = next_token_loss(model(tokens), torch.randint(0, SMALL.vocabulary, tokens.shape))
    assert loss.item() == pytest.approx(math.log(SMALL.vocabulary), rel=0.01)


def test_attention_is_causal() -> None:
    model = build_gpt(SMALL)
    tokens = torch.randint(0, SMALL.vocabulary, (1, SMALL.context))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % SMALL.vocabulary
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_documents_longer_than_the_context_are_refused() -> None:
    model = build_gpt(replace(SMALL, positions="learned"))
    tokens = torch.zeros(2, 20, dtype=torch.int64)
    documents = torch.zeros_like(tokens)
    documents[:, 16:] = 1
    assert model(tokens, SequenceInfo(documents=documents)).shape == (2, 20, 97)
    documents[1, 16] = 0
    with pytest.raises(ValueError, match=r"expected at most 16 positions \(the model's context\), got 17"):
        model(tokens, SequenceInfo(documents=documents))
    with pytest.raises(ValueError, match=r"expected at most 16 positions \(the model's context\), got 41"):
        model(tokens, SequenceInfo(positions=2 * torch.arange(1, 21)))


def test_head_is_tied_to_the_embedding() -> None:
    model = build_gpt(SMALL)
    assert model[-1].weight is model[0].tokens.weight


def test_output_projections_have_smaller_initial_weights() -> None:
    torch.manual_seed(0)
    blocks = [b for b in build_gpt(GPTConfig(97, 16, 8, 2, 128)) if isinstance(b, TransformerBlock)]
    assert blocks[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert blocks[0].feed_forward.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_width_must_be_divisible_by_heads() -> None:
    with pytest.raises(ValueError, match=r"width=10 is not a multiple of 2 \* heads = 6"):
        GPTConfig(97, 16, 1, 3, 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_with_explicit_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(2, 3, 17, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    reference = [t.detach().double().requires_grad_() for t in qkv]
    ours, theirs = attention(*qkv), attention(*reference)
    weight = torch.randn(2, 3, 17, 8)
    (ours * weight).sum().backward()
    (theirs * weight.double()).sum().backward()
    torch.testing.assert_close(ours.double(), theirs, atol=0.03, rtol=0.03)
    for got, expected in zip(qkv, reference, strict=True):
        assert got.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(got.grad.double(), expected.grad, atol=0.1, rtol=0.1)


def test_generation_at_temperature_zero_is_greedy() -> None:
    torch.manual_seed(0)
    model = build_gpt(SMALL)
    prompt = [1, 2, 3]
    written = list(generate(model, prompt, 20, context=SMALL.context, temperature=0))
    tokens = list(prompt)
    for token in written:
        assert token == int(model(torch.tensor([tokens[-SMALL.context :]]))[0, -1].argmax())
        tokens.append(token)


def test_generation_depends_on_seed_and_top_k() -> None:
    model = build_gpt(SMALL)
    options = {"context": SMALL.context, "temperature": 1.0}
    once = list(generate(model, [5], 30, seed=1, top_k=0, **options))
    assert once == list(generate(model, [5], 30, seed=1, top_k=0, **options))
    assert once != list(generate(model, [5], 30, seed=2, top_k=0, **options))
    only = list(generate(model, [5], 30, seed=3, top_k=1, **options))
    assert only == list(generate(model, [5], 30, context=SMALL.context, temperature=0))


def test_generation_requires_a_prompt() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(build_gpt(SMALL), [], 1, context=SMALL.context))
