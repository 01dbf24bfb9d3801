"""Configurations of `transformers`: missing fields, fields that change nothing, activations and padding tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.models.hf import FolderError, from_pretrained, save_pretrained
from farandole.models.hf.fields import INACTIVE
from farandole.models.hf.pretrained import read_config
from farandole.models.layers import ACTIVATIONS
from tests.models.hf.compare import close, compare_loss, tokens_for
from tests.models.hf.families import FAMILIES, ROTARY, folder_of, reference, transformers

REQUIRED = "which the model requires"


def read(folder: Path, values: dict[str, Any]) -> Any:
    """Return the model's configuration for these fields of `config.json`, or the reason why it is refused."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        return read_config(folder).config
    except FolderError as error:
        return str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_fields_have_the_values_of_transformers(family: str, tmp_path: Path) -> None:
    """Remove each field: the field is required, or has the value that transformers assumes."""
    config_class, model_class, options = FAMILIES[family]
    kind, names = getattr(transformers, config_class), {"architectures": [model_class]}
    for given in ({}, options(random.Random(family))):
        fields = kind(**given).to_dict() | names
        for field in fields.keys() - {"model_type", "architectures"}:
            values = {name: value for name, value in fields.items() if name != field}
            found = read(tmp_path, values)
            try:
                assumed = kind.from_pretrained(tmp_path).to_dict() | names
            except Exception:
                continue  # transformers requires the field, or refuses its default with these sizes
            if not (isinstance(found, str) and (REQUIRED in found or "sliding_attention" in found)):
                assert found == read(tmp_path, assumed), field


@pytest.mark.parametrize("family", FAMILIES)
def test_inactive_fields_change_nothing(family: str, tmp_path: Path) -> None:
    config_class, model_class, options = FAMILIES[family]
    fields = getattr(transformers, config_class)(**options(random.Random(0))).to_dict()
    fields["architectures"] = [model_class]
    config = read(tmp_path, fields)
    for name, value in INACTIVE.items():
        if family != "t5" or name not in ("is_encoder_decoder", "is_decoder"):
            assert read(tmp_path, fields | {name: value}) == config
            assert f"unsupported fields: {name}=1;" in read(tmp_path, fields | {name: 1})


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "deepseek_v3"])
def test_activations(family: str, activation: str, tmp_path: Path) -> None:
    field = "activation_function" if family == "gpt2" else "hidden_act"
    theirs = reference(family, 0, **{field: activation})
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    tokens, targets = (tokens_for(theirs, 2, 9, seed=seed) for seed in range(2))
    logits = theirs(tokens, use_cache=False).logits
    close(ours(tokens), logits)
    compare_loss(ours, theirs, (tokens, None, targets), logits, tmp_path / "b")


@pytest.mark.parametrize("kind", ["silu", "gelu_new", "gated-relu", "gated-gelu", "gated-silu", "gated-tanh"])
def test_activations_of_t5(kind: str, tmp_path: Path) -> None:
    theirs = reference("t5", 0, feed_forward_proj=kind)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    source, target = (tokens_for(theirs, 2, 9, seed=seed) for seed in range(2))
    close(ours((source, target)), theirs(input_ids=source, decoder_input_ids=target).logits)


@pytest.mark.parametrize(
    "changes",
    [{"dense_act_fn": "gelu"}, {"dense_act_fn": "silu", "is_gated_act": False}, {"is_gated_act": True}],
)
@pytest.mark.parametrize("kind", ["relu", "gated-gelu"])
def test_fields_that_override_feed_forward_proj_of_t5(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    theirs = reference("t5", 0, feed_forward_proj=kind, **changes)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    del ours.pretrained  # write the configuration from scratch
    save_pretrained(ours, tmp_path / "b")
    again = type(theirs).from_pretrained(tmp_path / "b").eval()
    source, target = (tokens_for(theirs, 2, 9, seed=seed) for seed in range(2))
    for model in (theirs, again):
        close(ours((source, target)), model(input_ids=source, decoder_input_ids=target).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ROTARY)
def test_the_embedding_of_the_padding_token_has_no_gradient(family: str, tied: bool, tmp_path: Path) -> None:
    """As in transformers, which matters for models whose padding token is their end token."""
    theirs = reference(family, 0, pad_token_id=7, tie_word_embeddings=tied, num_hidden_layers=1)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    tokens, targets = (tokens_for(theirs, 2, 9, seed=seed) for seed in range(2))
    tokens[:, 3:5] = 7
    logits = theirs(tokens, use_cache=False).logits
    compare_loss(ours, theirs, (tokens, None, targets), logits, tmp_path / "b")
    assert bool(ours[0].tokens.weight.grad[7].any()) == tied


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("bert", {"tie_word_embeddings": False}, "only BERT models whose head is tied"),
        ("llama", {"pad_token_id": 999}, "expected padding to be a token from 0 to"),
        ("qwen2", {"layer_types": ["sliding_attention"], "num_hidden_layers": 1}, "use_sliding_window=False"),
        ("deepseek_v3", {"head_dim": 4}, r"head_dim=4, which is not supported \(supported: 8\)"),
        ("gpt2", {"activation_function": "gelu_nwe"}, "gelu_nwe.*nearest: gelu_new"),
        (
            "bert-classifier",
            {"problem_type": "regression"},
            "problem_type='regression', which is not supported",
        ),
        ("bert-classifier", {"classifier_dropout": 0.5}, "classifier_dropout=0.5: expected equal values"),
        ("vit", {"problem_type": "multi_label_classification"}, "problem_type='multi_label"),
        ("t5", {"feed_forward_proj": "gated-gleu"}, "nearest: gated-gelu"),
        ("t5", {"dense_act_fn": "gleu"}, "dense_act_fn='gleu'.*nearest: gelu"),
    ],
)
def test_invalid_fields_are_refused(family: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    fields = reference(family, 0).config.to_dict()
    fields["architectures"] = [FAMILIES[family][1]]
    fields |= {"use_sliding_window": False} if family == "qwen2" else {}
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(FolderError, match=says):
        read_config(tmp_path)
