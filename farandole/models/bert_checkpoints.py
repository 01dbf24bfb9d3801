"""Convert published BERT weights to the names of `build_bert`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_UNUSED = re.compile(r"bert\.pooler\.|cls\.seq_relationship\.|bert\.embeddings\.position_ids$")
"""The next-sentence head, which `models.bert` does not have, and a buffer that older versions saved."""

_EMBEDDINGS = {
    "word_embeddings": "tokens",
    "position_embeddings": "positions",
    "token_type_embeddings": "segments",
    "LayerNorm": "norm",
}
_LAYER = {
    "attention.output.dense": "attention.out",
    "attention.output.LayerNorm": "norm_attention",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
    "output.LayerNorm": "norm_feed_forward",
}
_HEAD = {"transform.dense": "transform", "transform.LayerNorm": "norm"}
_PARTS = ("query", "key", "value")


def from_hugging_face(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state dict of a BertForMaskedLM or BertForPreTraining of `transformers` for `build_bert`.

    Query, key and value are concatenated.  The pooler, the next-sentence head and the prefix "module." of
    DistributedDataParallel are removed.  Names of older files (gamma, beta) are accepted.

        model.load_state_dict(from_hugging_face(safetensors.torch.load_file("model.safetensors")))

    Raises:
        ValueError: if a name is unknown or missing, or the decoder is not tied to the embedding.
    """
    plain = {_plain(name): tensor for name, tensor in state.items()}
    layers = 1 + max((int(found[1]) for name in plain if (found := _layer(name))), default=-1)
    result = {
        ours: tensor
        for name, tensor in plain.items()
        if not _UNUSED.match(name) and (ours := _renamed(name, layers)) is not None
    }
    try:
        for index in range(layers):
            for kind in ("weight", "bias"):
                prefix = f"bert.encoder.layer.{index}.attention.self"
                parts = [plain[f"{prefix}.{part}.{kind}"] for part in _PARTS]
                result[f"{index + 1}.attention.qkv.{kind}"] = torch.cat(parts)
        _head(plain, result, f"{layers + 1}")
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing: expected all weights of a BertForMaskedLM") from None
    return result


def _plain(name: str) -> str:
    name = name.removeprefix("module.")
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_NORM[m[1]]}", name)


_NORM = {"gamma": "weight", "beta": "bias"}


def _layer(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"bert\.encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name)


def _renamed(name: str, layers: int) -> str | None:
    """Return the new name of a tensor, or None if the tensor is handled separately."""
    module, _, kind = name.rpartition(".")
    if found := _layer(name):
        if found[2].removeprefix("attention.self.") in _PARTS:
            return None
        if found[2] in _LAYER:
            return f"{int(found[1]) + 1}.{_LAYER[found[2]]}.{kind}"
    for prefix, names, block in (
        ("bert.embeddings.", _EMBEDDINGS, 0),
        ("cls.predictions.", _HEAD, layers + 1),
    ):
        ours = names.get(module.removeprefix(prefix)) if module.startswith(prefix) else None
        if ours is not None:
            return f"{block}.{ours}.{kind}"
    if name in ("cls.predictions.bias", "cls.predictions.decoder.bias", "cls.predictions.decoder.weight"):
        return None
    raise ValueError(
        f"unexpected name {name!r}: expected the names of a BertForMaskedLM (bert.embeddings.word_embeddings.weight, "
        "bert.encoder.layer.0.attention.self.query.weight, ..., cls.predictions.bias)"
    )


def _head(plain: dict[str, Tensor], result: dict[str, Tensor], block: str) -> None:
    """Add the head's weight, which is the token embedding and may be repeated, and its bias, which has two names."""
    embedding = plain["bert.embeddings.word_embeddings.weight"]
    decoder = plain.get("cls.predictions.decoder.weight", embedding)
    if decoder.shape != embedding.shape or not torch.equal(decoder, embedding):
        raise ValueError(
            "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight: "
            "build_bert needs a head that is tied to the embedding"
        )
    bias = plain.get("cls.predictions.bias")
    result[f"{block}.weight"] = embedding
    result[f"{block}.bias"] = plain["cls.predictions.decoder.bias"] if bias is None else bias
