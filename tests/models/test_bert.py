"""BERT: parameter counts, layers compared with torch's, padding, and initialization block by block."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.data.masking import MaskedBatches, Masking
from farandole.data.sampler import Sampler
from farandole.data.text import Windows
from farandole.models.attention import attention, masked_attention
from farandole.models.bert import (
    EPSILON,
    BERTBlock,
    BERTConfig,
    bert_config,
    block_generator,
    build_bert,
    initialize,
)
from farandole.models.sequence import SequenceInfo
from farandole.parallel.engine import Engine
from tests.pool import Ranks

SMALL = BERTConfig(vocabulary=97, context=16, layers=3, heads=2, width=8, feed_forward=20)
PADDED = replace(SMALL, padding=0)


def _tokens(*shape: int) -> Tensor:
    return torch.randint(1, SMALL.vocabulary, shape)


@pytest.mark.parametrize("name", ["bert-base", "bert-large", "bert-2.5b", "tiny", SMALL])
def test_parameter_count(name: str | BERTConfig) -> None:
    config = bert_config(name) if isinstance(name, str) else name
    with torch.device("meta"):
        model = build_bert(config)
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == config.parameters


def test_published_parameter_counts() -> None:
    # bert-base-uncased and bert-large-uncased as BertForMaskedLM of transformers 5
    assert bert_config("bert-base").parameters == 109_514_298
    assert bert_config("bert-large").parameters == 335_174_458
    assert bert_config("bert-2.5b").parameters == 2_451_340_090


def test_config_by_name_with_changes() -> None:
    assert bert_config("bert-base", dropout=0.0).dropout == 0
    assert bert_config("bert-base", width=120).feed_forward == 480
    assert bert_config("bert-base", width=120, feed_forward=7).feed_forward == 7
    with pytest.raises(ValueError, match=r"unknown model 'BERT-bass'; nearest: bert-base"):
        bert_config("BERT-bass")


def _as_torch(block: BERTBlock, config: BERTConfig) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(
        config.width,
        config.heads,
        config.feed_forward,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=EPSILON,
        batch_first=True,
        norm_first=False,
        dtype=torch.float64,
    )
    names = {
        "attention.qkv.weight": "self_attn.in_proj_weight",
        "attention.qkv.bias": "self_attn.in_proj_bias",
        "attention.out": "self_attn.out_proj",
        "norm_attention": "norm1",
        "feed_forward.up": "linear1",
        "feed_forward.down": "linear2",
        "norm_feed_forward": "norm2",
    }
    state = {}
    for name, tensor in block.state_dict().items():
        old = name if name in names else name.rpartition(".")[0]
        state[name.replace(old, names[old])] = tensor
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize("padding", [False, True])
def test_layer_matches_torch(padding: bool) -> None:
    torch.manual_seed(0)
    ours = build_bert(SMALL)[1].double()
    for parameter in ours.parameters():  # also biases and normalization
        nn.init.normal_(parameter, std=0.5)
    theirs = _as_torch(ours, SMALL)
    x = torch.randn(3, 9, SMALL.width, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    real = torch.ones(3, 9, dtype=torch.bool)
    if padding:
        real[0, 5:] = real[2, :1] = False
    got = ours(inputs[0], SequenceInfo(documents=(~real).int()) if padding else None)
    expected = theirs(inputs[1], src_key_padding_mask=~real if padding else None)
    torch.testing.assert_close(got[real], expected[real])
    weight = torch.randn_like(got)[real]
    (got[real] * weight).sum().backward()
    (expected[real] * weight).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert len(gradients) == len(list(ours.parameters()))
    for parameter, gradient in zip(ours.parameters(), _in_our_order(gradients), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def _in_our_order(gradients: dict[str, Tensor | None]) -> list[Tensor | None]:
    order = ("self_attn.in_proj_", "self_attn.out_proj.", "norm1.", "linear1.", "linear2.", "norm2.")
    return [gradients[prefix + kind] for prefix in order for kind in ("weight", "bias")]


def test_positions_attend_to_all_others_except_padding() -> None:
    model = build_bert(PADDED, seed=0)
    tokens = _tokens(2, 12)
    tokens[0, 8:] = 0
    before = model(tokens)
    changed = tokens.clone()
    changed[:, 7] = changed[:, 7] % 96 + 1
    assert (model(changed) - before).abs().amax(-1)[:, :8].min() > 1e-6
    # a shorter window without padding gives the same logits
    torch.testing.assert_close(model(tokens[:1, :8]), before[:1, :8])
    without = build_bert(SMALL, seed=0)
    torch.testing.assert_close(without(tokens[:1, :8]), before[:1, :8])


def test_window_of_only_padding_gives_finite_gradients() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = build_bert(PADDED, seed=0).to(dtype)
        tokens = _tokens(2, 12)
        tokens[1] = 0
        targets = torch.where(tokens == 0, -100, tokens)
        total, count = model(tokens, None, targets)
        total.backward()
        assert count == 12
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_segments_differ_and_default_to_0() -> None:
    model = build_bert(SMALL, seed=0)
    tokens, segments = _tokens(2, 5), torch.zeros(2, 5, dtype=torch.int64)
    torch.testing.assert_close(model((tokens, segments)), model(tokens))
    assert not torch.allclose(model((tokens, segments + 1)), model(tokens))
    for longer in (model, build_bert(PADDED, seed=0)):
        with pytest.raises(
            ValueError, match=r"expected at most 16 positions \(the model's context\), got 17"
        ):
            longer(_tokens(1, 17))


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    model = build_bert(replace(SMALL, width=64, feed_forward=256), seed=0)
    tokens = _tokens(64, 16)
    total, count = model(tokens, None, torch.randint_like(tokens, 97))
    assert total.item() / count == pytest.approx(math.log(97), rel=0.02)


def test_initialization_block_by_block_gives_the_same_weights() -> None:
    before = torch.random.get_rng_state()
    whole = build_bert(SMALL, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.device("meta"):
        model = build_bert(SMALL)
    assert model[-1].weight is model[0].tokens.weight
    for index in (2, 0, 4, 3, 1):  # in any order
        initialize(model[index].to_empty(device="cpu"), block_generator(7, index))
    model[-1].weight = model[0].tokens.weight
    expected = whole.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(expected["1.attention.qkv.weight"], expected["2.attention.qkv.weight"])
    other = build_bert(SMALL, seed=8).state_dict()
    assert not torch.equal(expected["0.tokens.weight"], other["0.tokens.weight"])


def test_initial_weights_depend_on_the_seed_but_not_on_the_type() -> None:
    half = BERTBlock(SMALL).bfloat16()
    initialize(half, block_generator(7, 1))
    for got, expected in zip(half.parameters(), build_bert(SMALL, seed=7)[1].parameters(), strict=True):
        assert torch.equal(got, expected.bfloat16())
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(build_bert(SMALL))
    same = [torch.equal(models[0][0].tokens.weight, model[0].tokens.weight) for model in models]
    assert same == [True, True, False]
    wide = build_bert(replace(SMALL, width=256), seed=0)
    assert wide[1].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_initializing_a_meta_block_is_refused() -> None:
    with torch.device("meta"):
        model = build_bert(SMALL)
    with pytest.raises(ValueError, match=re.escape("call block.to_empty(device=...) first")):
        initialize(model[1], block_generator(0, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "width=8 is not a multiple of heads=3"),
        ({"layers": 0}, "expected sizes of at least 1"),
        ({"feed_forward": -1}, "expected sizes of at least 1"),
        ({"dropout": 1.0}, "expected dropout of at least 0 and below 1, got 1.0"),
        ({"padding": 97}, "expected padding to be a token from 0 to 96 .vocabulary=97., got 97"),
    ],
)
def test_invalid_configurations_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_dropout_applies_only_in_training() -> None:
    model = build_bert(replace(SMALL, dropout=0.5), seed=0)
    tokens = _tokens(2, 7)
    assert not torch.equal(model(tokens), model(tokens))
    torch.testing.assert_close(model.eval()(tokens), build_bert(SMALL, seed=0)(tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [False, True])
def test_attention_with_explicit_products(dtype: torch.dtype, padding: bool) -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(2, 3, 17, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    reference = [t.detach().double().requires_grad_() for t in qkv]
    info = None
    if padding:
        documents = torch.zeros(2, 17, dtype=torch.int64)
        documents[0, 11:] = documents[1, 3] = 1
        info = SequenceInfo(documents=documents)
    ours, theirs = attention(*qkv, info, causal=False), attention(*reference, info, causal=False)
    weight = torch.randn(2, 3, 17, 8)
    (ours * weight).sum().backward()
    (theirs * weight.double()).sum().backward()
    torch.testing.assert_close(ours.double(), theirs, atol=0.03, rtol=0.03)
    for got, expected in zip(qkv, reference, strict=True):
        assert got.grad is not None and expected.grad is not None
        torch.testing.assert_close(got.grad.double(), expected.grad, atol=0.1, rtol=0.1)
    assert not torch.allclose(attention(*qkv), ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_without_visible_keys_have_zero_output_and_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(2, 3, size, 8, dtype=dtype) for size in (5, 7, 7)]
    mask = torch.rand(2, 1, 5, 7) < 0.5
    mask[0] = mask[1, 0, 2] = False
    visible = mask.any(-1, keepdim=True)
    results = []
    for some in (mask, mask | ~visible):
        inputs = [t.clone().requires_grad_() for t in qkv]
        output = masked_attention(*inputs, some, False, 0.5)
        results.append((output, torch.autograd.grad((output * visible).sum(), inputs)))
    (output, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(output, expected * visible, rtol=0, atol=0)
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=0)


def test_attention_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        query, key = (torch.randn(300, 2, 8, 4, dtype=dtype, requires_grad=True) for _ in range(2))
        value = torch.ones(300, 2, 8, 4, dtype=dtype)
        result = attention(query, key, value, causal=False, dropout=0.25).float()
        assert result.mean().item() == pytest.approx(1, abs=0.02)
        assert result.std().item() > 0.1


def _batches() -> MaskedBatches:
    tokens = np.random.default_rng(0).integers(2, SMALL.vocabulary, 16 * 40 + 1).astype(np.uint16)
    tokens[:200] = 0  # windows of only special tokens, so that ranks have different numbers of targets
    masking = Masking(SMALL.vocabulary, mask_token=1, special=(0,), seed=5)
    windows = Windows(tokens, 16)
    return MaskedBatches(windows, masking, Sampler(windows.samples, seed=3))


def _train(rank: int, size: int) -> dict[str, Tensor]:
    assert dist.group.WORLD is not None
    comm = Communicator(dist.group.WORLD)
    model, batches = build_bert(SMALL, seed=1), _batches()
    engine, optimizer = Engine(model, comm), torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        inputs, targets = map(torch.from_numpy, batches.next(8, rank, size))
        engine.zero_grad()
        total, count = model(inputs, None, targets)
        counts = torch.tensor([count])
        comm.all_reduce(counts)
        (total * size / counts.item()).backward()  # gradients are averaged over ranks
        engine.synchronize()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_ranks_match_one_process(ranks: Callable[..., Ranks]) -> None:
    model, batches = build_bert(SMALL, seed=1), _batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        inputs, targets = map(torch.from_numpy, batches.next(8, 0, 1))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    for state in ranks(2).run(_train):
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-4, atol=1e-5)
