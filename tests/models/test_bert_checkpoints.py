"""Converted BERT weights, compared with `transformers`, or with its recorded results."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from farandole.models.bert import BERTConfig, build_bert
from farandole.models.bert_checkpoints import from_hugging_face
from farandole.models.loss import masked_token_loss

CONFIG = BERTConfig(vocabulary=50, context=12, layers=11, heads=2, width=8, feed_forward=20, padding=0)

# Results of BertForMaskedLM of transformers 5.23 with the weights of `_wave`, in fp64, without dropout: every 97th
# logit of tokens that are not padding, the mean cross-entropy of three tokens, and the norms of some gradients.
LOGITS = [
    -1.227227309,
    0.544638897,
    -2.476897115,
    1.78559809,
    0.84061915,
    -2.566776206,
    1.471449929,
    1.172284139,
    -2.60070893,
    1.224147207,
    1.488577097,
]
LOSS = 4.585712584
GRADIENTS = {
    "0.tokens.weight": 1.549427072,
    "0.positions.weight": 0.019493136,
    "2.attention.out.weight": 0.013709418,
    "1.feed_forward.up.bias": 0.003978133,
    "4.bias": 0.561727271,
}


def _wave(name: str, tensor: Tensor) -> Tensor:
    wave = torch.sin(torch.arange(tensor.numel(), dtype=torch.float64) * 0.7 + len(name)).view(tensor.shape)
    if tensor.dim() > 1:
        return wave * 0.5
    return 1 + 0.1 * wave if name.endswith("weight") else wave * 0.1


def _published(config: BERTConfig) -> dict[str, Tensor]:
    """Return random weights with the names and shapes of transformers 5."""
    d, f, v = config.width, config.feed_forward, config.vocabulary
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (v, d),
        "bert.embeddings.position_embeddings.weight": (config.context, d),
        "bert.embeddings.token_type_embeddings.weight": (2, d),
        "bert.embeddings.LayerNorm.weight": (d,),
        "bert.embeddings.LayerNorm.bias": (d,),
        "cls.predictions.bias": (v,),
        "cls.predictions.transform.dense.weight": (d, d),
        "cls.predictions.transform.dense.bias": (d,),
        "cls.predictions.transform.LayerNorm.weight": (d,),
        "cls.predictions.transform.LayerNorm.bias": (d,),
    }
    modules = {f"attention.self.{part}": (d, d) for part in ("query", "key", "value")} | {
        "attention.output.dense": (d, d),
        "attention.output.LayerNorm": (d,),
        "intermediate.dense": (f, d),
        "output.dense": (d, f),
        "output.LayerNorm": (d,),
    }
    for layer in range(config.layers):
        for module, shape in modules.items():
            shapes[f"bert.encoder.layer.{layer}.{module}.weight"] = shape
            shapes[f"bert.encoder.layer.{layer}.{module}.bias"] = shape[:1]
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_all_weights_are_converted() -> None:
    state = _published(CONFIG)
    model = build_bert(CONFIG)
    model.load_state_dict(from_hugging_face(state))
    assert torch.equal(
        model[11].feed_forward.up.weight, state["bert.encoder.layer.10.intermediate.dense.weight"]
    )
    assert torch.equal(
        model[3].attention.qkv.bias[8:16], state["bert.encoder.layer.2.attention.self.key.bias"]
    )
    assert model[-1].weight is model[0].tokens.weight
    assert sum(t.numel() for t in state.values()) == CONFIG.parameters


def test_results_match_recorded_transformers() -> None:
    config = replace(CONFIG, layers=3)
    model = build_bert(config).double()
    state = {name: _wave(name, tensor) for name, tensor in _published(config).items()}
    model.load_state_dict(from_hugging_face(state))
    tokens = torch.arange(2, 50, 2).view(2, 12)
    tokens[1, 8:] = 0
    segments = torch.arange(24).view(2, 12) % 3 // 2
    logits = model((tokens, segments))
    assert logits[tokens != 0].flatten()[::97].tolist() == pytest.approx(LOGITS, abs=1e-8)
    targets = torch.full((2, 12), -100)
    targets[0, 3], targets[1, 0], targets[1, 7] = 7, 11, 49
    total, count = masked_token_loss(model[-1], model[:-1]((tokens, segments)), targets)
    (total / count).backward()
    assert total.item() / count == pytest.approx(LOSS, rel=1e-6)  # summed in fp32
    parameters = dict(model.named_parameters())
    norms = {name: parameters[name].grad.norm().item() for name in GRADIENTS}
    assert norms == pytest.approx(GRADIENTS, rel=1e-6)


def test_alternative_names_are_accepted() -> None:
    state = _published(CONFIG)
    expected = from_hugging_face(state)
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): t
        for name, t in state.items()
    }
    extra = {
        "bert.pooler.dense.weight": torch.ones(8, 8),
        "bert.pooler.dense.bias": torch.ones(8),
        "cls.seq_relationship.weight": torch.ones(2, 8),
        "cls.seq_relationship.bias": torch.ones(2),
        "bert.embeddings.position_ids": torch.arange(12)[None],
        "cls.predictions.decoder.weight": state["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": state["cls.predictions.bias"],
    }
    prefixed = {f"module.{name}": tensor for name, tensor in state.items()}
    for alternative in (old, state | extra, prefixed):
        got = from_hugging_face(alternative)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in got)


def test_invalid_states_are_refused() -> None:
    state = _published(CONFIG)
    with pytest.raises(
        ValueError, match="unexpected name 'roberta.x.weight': expected the names of a BertForMaskedLM"
    ):
        from_hugging_face(state | {"roberta.x.weight": torch.ones(1)})
    with pytest.raises(ValueError, match="layer.3.attention.self.key.bias is missing"):
        from_hugging_face({n: t for n, t in state.items() if "3.attention.self.key.bias" not in n})
    with pytest.raises(
        ValueError, match="predictions.*bias is missing: expected all weights of a BertForMaskedLM"
    ):
        from_hugging_face({n: t for n, t in state.items() if n.startswith("bert.")})
    with pytest.raises(ValueError, match="word_embeddings.weight is missing"):
        from_hugging_face({})
    with pytest.raises(ValueError, match="needs a head that is tied to the embedding"):
        from_hugging_face(state | {"cls.predictions.decoder.weight": torch.ones(50, 8)})


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip(
        "transformers", reason="transformers is not installed (pip install transformers)"
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_outputs_and_gradients_match_transformers(transformers: Any, seed: int) -> None:
    theirs, model = _both(transformers, seed)
    tokens = torch.randint(1, CONFIG.vocabulary, (3, 12))
    tokens[0, 7:] = 0
    segments = torch.randint(0, 2, tokens.shape)
    real = tokens != 0
    expected = theirs(tokens, attention_mask=real.long(), token_type_ids=segments).logits
    got = model((tokens, segments))
    torch.testing.assert_close(got[real], expected[real])
    weight = torch.randn_like(got)[real]
    (got[real] * weight).sum().backward()
    (expected[real] * weight).sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if "pooler" not in name}
    # gradients have the names of weights; the tied weight has one gradient
    for name, gradient in from_hugging_face(gradients).items():
        torch.testing.assert_close(dict(model.named_parameters(remove_duplicate=False))[name].grad, gradient)


def _both(transformers: Any, seed: int) -> tuple[Any, torch.nn.Sequential]:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=CONFIG.vocabulary,
        hidden_size=CONFIG.width,
        num_hidden_layers=CONFIG.layers,
        num_attention_heads=CONFIG.heads,
        intermediate_size=CONFIG.feed_forward,
        max_position_embeddings=CONFIG.context,
        initializer_range=0.3,
        pad_token_id=0,
    )
    theirs = transformers.BertForMaskedLM(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # also biases and normalization
    model = build_bert(CONFIG).double()
    model.load_state_dict(from_hugging_face(theirs.state_dict()))
    return theirs, model


def test_saved_model_loads(transformers: Any, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    theirs, model = _both(transformers, 2)
    theirs.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == CONFIG.vocabulary
    other = build_bert(CONFIG).double()
    other.load_state_dict(from_hugging_face(load_file(tmp_path / "model.safetensors")))
    tokens = torch.randint(1, CONFIG.vocabulary, (2, 12))
    torch.testing.assert_close(other(tokens), model(tokens))


@pytest.mark.parametrize("shape", [(12, 12, 768), (24, 16, 1024)])
def test_published_sizes(transformers: Any, shape: tuple[int, int, int]) -> None:
    layers, heads, width = shape
    config = transformers.BertConfig(
        num_hidden_layers=layers, num_attention_heads=heads, hidden_size=width, intermediate_size=4 * width
    )
    with torch.device("meta"):
        theirs = transformers.BertForMaskedLM(config)
    ours = BERTConfig(config.vocab_size, config.max_position_embeddings, layers, heads, width)
    assert sum(p.numel() for p in theirs.parameters()) == ours.parameters
