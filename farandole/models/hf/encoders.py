"""Define families with an encoder: bert, vit and t5."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from farandole.models.bert import BERTConfig, bert
from farandole.models.hf.architecture import Architecture
from farandole.models.hf.decoders import one_dropout
from farandole.models.hf.fields import Fields, FolderError
from farandole.models.hf.mapping import Table
from farandole.models.layers import ACTIVATIONS
from farandole.models.t5 import T5Config, t5
from farandole.models.vit import ViTConfig, vit

FAMILIES: list[Architecture] = []
"""The families of encoders."""


def classes_of(fields: Fields) -> int:
    """Return the number of classes that a configuration declares.

    Raises:
        FolderError: if the loss is not the cross-entropy of one class per sample.
    """
    fields.one_of("problem_type", "single_label_classification")
    labels = fields.take("id2label", None, kind=dict)
    return len(labels) if labels else int(fields.take("num_labels", 2, kind=int))


def label_fields(classes: int) -> dict[str, Any]:
    """Return the configuration fields that name the classes."""
    names = {str(number): f"LABEL_{number}" for number in range(classes)}
    return {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}


# ---- BERT ----


def _read_bert(fields: Fields) -> BERTConfig:
    fields.one_of("position_embedding_type", "absolute")
    fields.skip("directionality", *(name for name in fields.values if name.startswith("pooler_")))
    names = fields.values.get("architectures") or ["BertForMaskedLM"]
    classifies = "BertForSequenceClassification" in names
    tied = fields.take("tie_word_embeddings", True, kind=bool)
    if not (tied or classifies):
        raise FolderError(
            f"{fields.where} has tie_word_embeddings=False: only BERT models whose head is tied to the embedding are "
            "supported"
        )
    dropouts = ["hidden_dropout_prob", "attention_probs_dropout_prob"]
    if classifies and fields.values.get("classifier_dropout") is not None:
        dropouts.append("classifier_dropout")
    return BERTConfig(
        vocabulary=fields.size("vocab_size"),
        context=fields.size("max_position_embeddings"),
        layers=fields.size("num_hidden_layers"),
        heads=fields.size("num_attention_heads"),
        width=fields.size("hidden_size"),
        feed_forward=fields.size("intermediate_size"),
        segments=fields.size("type_vocab_size"),
        dropout=one_dropout(fields, *dropouts),
        padding=fields.take("pad_token_id", None, kind=int),
        activation=fields.one_of("hidden_act", "gelu", *ACTIVATIONS),
        epsilon=fields.positive("layer_norm_eps", 1e-12),
        classes=classes_of(fields) if classifies else 0,
    )


def _write_bert(config: BERTConfig) -> dict[str, Any]:
    labels = label_fields(config.classes) if config.classes else {}
    return {
        "architectures": ["BertForSequenceClassification" if config.classes else "BertForMaskedLM"],
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward,
        "type_vocab_size": config.segments,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "pad_token_id": config.padding,
        "hidden_act": config.activation,
        "layer_norm_eps": config.epsilon,
        **labels,
    }


def _bert_table(config: BERTConfig) -> Table:
    heads = [r"cls\.predictions\.decoder\.(weight|bias)", r"cls\.seq_relationship\..*"]
    ignored = [r"(bert\.)?embeddings\.position_ids", *heads]
    ignored += [r"cls\..*"] if config.classes else [r"(bert\.)?pooler\..*", r"classifier\..*"]
    older = (
        (r"^module\.", ""),
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
    )
    table = Table("bert.", tuple(ignored), older)
    embedding = "bert.embeddings"
    for ours, theirs in (("tokens", "word"), ("positions", "position"), ("segments", "token_type")):
        table.copy(f"0.{ours}.weight", f"{embedding}.{theirs}_embeddings.weight")
    table.linear("0.norm", f"{embedding}.LayerNorm", bias=True)
    for layer in range(config.layers):
        ours, theirs = f"{layer + 1}", f"bert.encoder.layer.{layer}"
        projections = {f"{theirs}.attention.self.{name}": config.width for name in ("query", "key", "value")}
        table.linears(f"{ours}.attention.qkv", projections, bias=True)
        table.linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense", bias=True)
        table.linear(f"{ours}.norm_attention", f"{theirs}.attention.output.LayerNorm", bias=True)
        table.linear(f"{ours}.feed_forward.up", f"{theirs}.intermediate.dense", bias=True)
        table.linear(f"{ours}.feed_forward.down", f"{theirs}.output.dense", bias=True)
        table.linear(f"{ours}.norm_feed_forward", f"{theirs}.output.LayerNorm", bias=True)
    head = f"{config.layers + 1}"
    if config.classes:
        table.linear(f"{head}.pooler", "bert.pooler.dense", bias=True)
        table.linear(f"{head}.classifier", "classifier", bias=True)
    else:
        table.linear(f"{head}.transform", "cls.predictions.transform.dense", bias=True)
        table.linear(f"{head}.norm", "cls.predictions.transform.LayerNorm", bias=True)
        table.copy(f"{head}.bias", "cls.predictions.bias")
    return table


FAMILIES.append(
    Architecture(
        "bert",
        ("BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification", "BertModel"),
        BERTConfig,
        _read_bert,
        _write_bert,
        bert,
        _bert_table,
        defaults={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "pad_token_id": 0},
    )
)


# ---- ViT ----


def _pair(fields: Fields, name: str) -> tuple[int, int]:
    value: int | Sequence[int] = fields.take(name, kind=(int, list, tuple))
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _read_vit(fields: Fields) -> ViTConfig:
    fields.skip("encoder_stride", "pooler_output_size", "pooler_act")
    (height, width), (patch_height, patch_width) = _pair(fields, "image_size"), _pair(fields, "patch_size")
    return ViTConfig(
        height=height,
        image_width=width,
        patch_height=patch_height,
        patch_width=patch_width,
        layers=fields.size("num_hidden_layers"),
        heads=fields.size("num_attention_heads"),
        width=fields.size("hidden_size"),
        inner=fields.size("intermediate_size"),
        classes=classes_of(fields),
        channels=fields.size("num_channels", 3),
        activation=fields.one_of("hidden_act", "gelu", *ACTIVATIONS),
        epsilon=fields.positive("layer_norm_eps", 1e-12),
        bias=fields.take("qkv_bias", True, kind=bool),
        dropout=fields.probability("hidden_dropout_prob", 0.0),
        attention_dropout=fields.probability("attention_probs_dropout_prob", 0.0),
    )


def _write_vit(config: ViTConfig) -> dict[str, Any]:
    def sizes(height: int, width: int) -> int | list[int]:
        return height if height == width else [height, width]

    return {
        "image_size": sizes(config.height, config.image_width),
        "patch_size": sizes(config.patch_height, config.patch_width),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "hidden_size": config.width,
        "intermediate_size": config.inner,
        "num_channels": config.channels,
        "hidden_act": config.activation,
        "layer_norm_eps": config.epsilon,
        "qkv_bias": config.bias,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        **label_fields(config.classes),
    }


def _vit_table(config: ViTConfig) -> Table:
    modules = (  # in transformers 5, module names differ from the names in files
        (r"vit\.encoder\.layer\.", "vit.layers."),
        (r"attention\.attention\.query", "attention.q_proj"),
        (r"attention\.attention\.key", "attention.k_proj"),
        (r"attention\.attention\.value", "attention.v_proj"),
        (r"attention\.output\.dense", "attention.o_proj"),
        (r"(\d)\.intermediate\.dense", r"\1.mlp.fc1"),
        (r"(\d)\.output\.dense", r"\1.mlp.fc2"),
    )
    table = Table("vit.", (r"vit\.pooler\..*", r"vit\.embeddings\.mask_token"), modules=modules)
    embedding = "vit.embeddings"
    table.linear("0.patches", f"{embedding}.patch_embeddings.projection", bias=True)
    table.copy("0.class_token", f"{embedding}.cls_token")
    table.copy("0.positions", f"{embedding}.position_embeddings")
    for layer in range(config.layers):
        ours, theirs = f"{layer + 1}", f"vit.encoder.layer.{layer}"
        table.linear(f"{ours}.norm_attention", f"{theirs}.layernorm_before", bias=True)
        projections = {
            f"{theirs}.attention.attention.{name}": config.width for name in ("query", "key", "value")
        }
        table.linears(f"{ours}.attention.qkv", projections, bias=config.bias)
        table.linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense", bias=True)
        table.linear(f"{ours}.norm_feed_forward", f"{theirs}.layernorm_after", bias=True)
        table.linear(f"{ours}.feed_forward.up", f"{theirs}.intermediate.dense", bias=True)
        table.linear(f"{ours}.feed_forward.down", f"{theirs}.output.dense", bias=True)
    head = f"{config.layers + 1}"
    table.linear(f"{head}.norm", "vit.layernorm", bias=True)
    table.linear(f"{head}.classifier", "classifier", bias=True)
    return table


FAMILIES.append(
    Architecture(
        "vit", ("ViTForImageClassification", "ViTModel"), ViTConfig, _read_vit, _write_vit, vit, _vit_table
    )
)


# ---- T5 ----


def _read_t5(fields: Fields) -> T5Config:
    fields.one_of("is_encoder_decoder", True)
    fields.skip("is_decoder", "n_positions", "scale_decoder_outputs")
    layers = fields.size("num_layers")
    kind = fields.one_of(
        "feed_forward_proj", "relu", *ACTIVATIONS, *(f"gated-{name}" for name in ACTIVATIONS)
    )
    tied = fields.take("tie_word_embeddings", True, kind=bool)
    scaled = fields.take("scale_decoder_outputs", tied, kind=bool)
    # in this family, gated-gelu has always meant the tanh approximation
    activation = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    return T5Config(
        vocabulary=fields.size("vocab_size"),
        encoder_layers=layers,
        decoder_layers=fields.size("num_decoder_layers", layers),
        heads=fields.size("num_heads"),
        width=fields.size("d_model"),
        head_width=fields.size("d_kv"),
        inner=fields.size("d_ff"),
        buckets=fields.size("relative_attention_num_buckets", 32),
        max_distance=fields.size("relative_attention_max_distance", 128),
        # as in transformers, these two fields override `feed_forward_proj`
        activation=fields.one_of("dense_act_fn", activation, *ACTIVATIONS),
        gated=fields.take("is_gated_act", kind.startswith("gated-"), kind=bool),
        dropout=fields.probability("dropout_rate", 0.1),
        epsilon=fields.positive("layer_norm_epsilon", 1e-6),
        padding=fields.take("pad_token_id", None, kind=int),
        tied=tied,
        scaled=scaled,
    )


def _write_t5(config: T5Config) -> dict[str, Any]:
    gated = "gated-gelu" if config.activation == "gelu_new" else f"gated-{config.activation}"
    return {
        "is_encoder_decoder": True,
        "vocab_size": config.vocabulary,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "num_heads": config.heads,
        "d_model": config.width,
        "d_kv": config.head_width,
        "d_ff": config.inner,
        "relative_attention_num_buckets": config.buckets,
        "relative_attention_max_distance": config.max_distance,
        "feed_forward_proj": gated if config.gated else config.activation,
        "dense_act_fn": config.activation,
        "is_gated_act": config.gated,
        "dropout_rate": config.dropout,
        "layer_norm_epsilon": config.epsilon,
        "pad_token_id": config.padding,
        "tie_word_embeddings": config.scaled,
        "scale_decoder_outputs": config.scaled,
    }


def _t5_table(config: T5Config) -> Table:
    tied = (r"lm_head\.weight",) if config.tied else ()
    table = Table("", (r"(encoder|decoder)\.embed_tokens\.weight", *tied))
    table.copy("0.tokens.weight", "shared.weight")
    bias = "relative_attention_bias.weight"
    for side in ("encoder", "decoder"):
        table.copy(f"0.{side}_bias.biases.weight", f"{side}.block.0.layer.0.SelfAttention.{bias}")
    inner = config.heads * config.head_width
    first_decoder = config.encoder_layers + 2
    for layer in range(config.encoder_layers):
        _t5_layer(table, config, f"{layer + 1}", f"encoder.block.{layer}.layer", 1)
    table.linear(f"{first_decoder - 1}.norm", "encoder.final_layer_norm")
    for layer in range(config.decoder_layers):
        ours, theirs = f"{first_decoder + layer}", f"decoder.block.{layer}.layer"
        _t5_layer(table, config, ours, theirs, 2)
        attention = f"{theirs}.1.EncDecAttention"
        table.linear(f"{ours}.norm_cross", f"{theirs}.1.layer_norm")
        table.linear(f"{ours}.cross.query", f"{attention}.q")
        table.linears(f"{ours}.cross.kv", {f"{attention}.k": inner, f"{attention}.v": inner})
        table.linear(f"{ours}.cross.out", f"{attention}.o")
    head = f"{first_decoder + config.decoder_layers}"
    table.linear(f"{head}.norm", "decoder.final_layer_norm")
    if not config.tied:
        table.copy(f"{head}.weight", "lm_head.weight")
    return table


def _t5_layer(table: Table, config: T5Config, ours: str, theirs: str, last: int) -> None:
    """Add the self-attention tensors of a T5 layer, and its feed-forward tensors (sublayer `last`)."""
    inner = config.heads * config.head_width
    attention = f"{theirs}.0.SelfAttention"
    table.linear(f"{ours}.norm_attention", f"{theirs}.0.layer_norm")
    table.linears(f"{ours}.attention.qkv", {f"{attention}.{name}": inner for name in "qkv"})
    table.linear(f"{ours}.attention.out", f"{attention}.o")
    table.linear(f"{ours}.norm_feed_forward", f"{theirs}.{last}.layer_norm")
    dense = f"{theirs}.{last}.DenseReluDense"
    if config.gated:
        table.linears(
            f"{ours}.feed_forward.gate_up", {f"{dense}.wi_0": config.inner, f"{dense}.wi_1": config.inner}
        )
    else:
        table.linear(f"{ours}.feed_forward.up", f"{dense}.wi")
    table.linear(f"{ours}.feed_forward.down", f"{dense}.wo")


def _t5_head(config: T5Config, names: Collection[str]) -> T5Config:
    """Return `config` with a tied head if the folder has no head weights, and with an untied head otherwise."""
    # transformers 5 declares every head as tied, so the configuration does not contain this information
    return replace(config, tied="lm_head.weight" not in names)


FAMILIES.append(
    Architecture(
        "t5",
        ("T5ForConditionalGeneration", "T5Model"),
        T5Config,
        _read_t5,
        _write_t5,
        t5,
        _t5_table,
        adapt=_t5_head,
        defaults={"pad_token_id": 0},
    )
)
