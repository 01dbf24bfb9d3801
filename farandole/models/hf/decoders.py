"""Define decoder-only families: gpt2, gptj, llama, mistral, qwen2, qwen3, mixtral and deepseek_v3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from farandole.models.deepseek import DeepSeekConfig, deepseek
from farandole.models.gpt import GPTConfig, gpt
from farandole.models.gptj import GPTJConfig, gptj
from farandole.models.hf.architecture import (
    Architecture,
    read_rotary,
    write_rotary,
    yarn_magnitude,
)
from farandole.models.hf.fields import Fields, FolderError
from farandole.models.hf.mapping import Table
from farandole.models.layers import ACTIVATIONS
from farandole.models.llama import LlamaConfig, llama
from farandole.models.mixtral import MixtralConfig, mixtral
from farandole.models.moe import Balance

FAMILIES: list[Architecture] = []
"""The families of decoders."""

_GELU = tuple(ACTIVATIONS)


def one_dropout(fields: Fields, *names: str) -> float:
    """Return the common value of the dropout fields `names`.

    Raises:
        FolderError: if the probabilities differ.
    """
    values = {name: fields.probability(name, 0.0) for name in names}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name}={value}" for name, value in values.items())
        raise FolderError(
            f"{fields.where} has {listed}: expected equal values; set these fields to the same value"
        )
    return next(iter(values.values()))


# ---- GPT-2 ----


def _read_gpt2(fields: Fields) -> GPTConfig:
    fields.one_of("scale_attn_weights", True)
    fields.one_of("scale_attn_by_inverse_layer_idx", False)
    fields.skip("reorder_and_upcast_attn", *(name for name in fields.values if name.startswith("summary_")))
    width = fields.size("n_embd")
    return GPTConfig(
        vocabulary=fields.size("vocab_size"),
        context=fields.size("n_positions"),
        layers=fields.size("n_layer"),
        heads=fields.size("n_head"),
        width=width,
        dropout=one_dropout(fields, "resid_pdrop", "embd_pdrop"),
        attention_dropout=fields.probability("attn_pdrop", 0.0),
        positions="learned",
        activation=fields.one_of("activation_function", "gelu_new", *_GELU),
        inner=fields.take("n_inner", 0, kind=int),
        epsilon=fields.positive("layer_norm_epsilon", 1e-5),
        tied=fields.take("tie_word_embeddings", True, kind=bool),
    )


def _write_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocabulary,
        "n_positions": config.context,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "n_inner": config.inner or None,
        "activation_function": config.activation,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "layer_norm_epsilon": config.epsilon,
        "tie_word_embeddings": config.tied,
    }


def _gpt2_table(config: GPTConfig) -> Table:
    tied = (r"lm_head\.weight",) if config.tied else ()
    table = Table("transformer.", (r".*\.attn\.(bias|masked_bias)", *tied))
    table.copy("0.tokens.weight", "transformer.wte.weight")
    table.copy("0.positions.weight", "transformer.wpe.weight")
    for layer in range(config.layers):
        ours, theirs = f"{layer + 1}", f"transformer.h.{layer}"
        table.linear(f"{ours}.norm_attention", f"{theirs}.ln_1", bias=True)
        table.linear(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", bias=True, transposed=True)
        table.linear(f"{ours}.attention.out", f"{theirs}.attn.c_proj", bias=True, transposed=True)
        table.linear(f"{ours}.norm_feed_forward", f"{theirs}.ln_2", bias=True)
        table.linear(f"{ours}.feed_forward.up", f"{theirs}.mlp.c_fc", bias=True, transposed=True)
        table.linear(f"{ours}.feed_forward.down", f"{theirs}.mlp.c_proj", bias=True, transposed=True)
    table.linear(f"{config.layers + 1}.norm", "transformer.ln_f", bias=True)
    if not config.tied:
        table.copy(f"{config.layers + 1}.weight", "lm_head.weight")
    return table


FAMILIES.append(
    Architecture(
        "gpt2",
        ("GPT2LMHeadModel", "GPT2Model"),
        GPTConfig,
        _read_gpt2,
        _write_gpt2,
        gpt,
        _gpt2_table,
        lambda config: config.positions == "learned",
        defaults={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    )
)


# ---- GPT-J ----


def _read_gptj(fields: Fields) -> GPTJConfig:
    fields.skip(
        "n_positions", "rotary", "scale_attn_weights", *(n for n in fields.values if n.startswith("summary_"))
    )
    width, heads = fields.size("n_embd"), fields.size("n_head")
    return GPTJConfig(
        vocabulary=fields.size("vocab_size"),
        layers=fields.size("n_layer"),
        heads=heads,
        width=width,
        rotary=fields.size("rotary_dim", width // heads),
        inner=fields.take("n_inner", 0, kind=int),
        activation=fields.one_of("activation_function", "gelu_new", *_GELU),
        epsilon=fields.positive("layer_norm_epsilon", 1e-5),
        dropout=fields.probability("resid_pdrop", 0.0),
        attention_dropout=fields.probability("attn_pdrop", 0.0),
        embedding_dropout=fields.probability("embd_pdrop", 0.0),
        tied=fields.take("tie_word_embeddings", False, kind=bool),
    )


def _write_gptj(config: GPTJConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocabulary,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "rotary_dim": config.rotary,
        "n_inner": config.inner or None,
        "activation_function": config.activation,
        "layer_norm_epsilon": config.epsilon,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "embd_pdrop": config.embedding_dropout,
        "tie_word_embeddings": config.tied,
    }


def _gptj_table(config: GPTJConfig) -> Table:
    tied = (r"lm_head\.weight",) if config.tied else ()
    table = Table("transformer.", (r".*\.attn\.(bias|masked_bias|embed_positions)", *tied))
    table.copy("0.tokens.weight", "transformer.wte.weight")
    for layer in range(config.layers):
        ours, theirs = f"{layer + 1}", f"transformer.h.{layer}"
        table.linear(f"{ours}.norm", f"{theirs}.ln_1", bias=True)
        projections = {f"{theirs}.attn.{name}_proj": config.width for name in "qkv"}
        table.linears(f"{ours}.attention.qkv", projections)
        table.linear(f"{ours}.attention.out", f"{theirs}.attn.out_proj")
        table.linear(f"{ours}.feed_forward.up", f"{theirs}.mlp.fc_in", bias=True)
        table.linear(f"{ours}.feed_forward.down", f"{theirs}.mlp.fc_out", bias=True)
    head = f"{config.layers + 1}"
    table.linear(f"{head}.norm", "transformer.ln_f", bias=True)
    table.copy(f"{head}.bias", "lm_head.bias")
    if not config.tied:
        table.copy(f"{head}.weight", "lm_head.weight")
    return table


FAMILIES.append(
    Architecture(
        "gptj",
        ("GPTJForCausalLM", "GPTJModel"),
        GPTJConfig,
        _read_gptj,
        _write_gptj,
        gptj,
        _gptj_table,
        defaults={"rotary_dim": 64},
    )
)


# ---- Llama, Mistral, Qwen 2, Qwen 3 ----


def llama_fields(fields: Fields, *, tied: bool = False) -> dict[str, Any]:
    """Return the `LlamaConfig` arguments that are common to all Llama-like families."""
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_width = fields.size("head_dim", width // heads)
    return {
        "vocabulary": fields.size("vocab_size"),
        "layers": fields.size("num_hidden_layers"),
        "heads": heads,
        "width": width,
        "inner": fields.size("intermediate_size"),
        "kv_heads": fields.size("num_key_value_heads", heads),
        "head_width": head_width,
        "rotary": read_rotary(fields, head_width),
        "activation": fields.one_of("hidden_act", "silu", *_GELU),
        "epsilon": fields.positive("rms_norm_eps", 1e-6),
        "tied": fields.take("tie_word_embeddings", tied, kind=bool),
        "attention_dropout": fields.probability("attention_dropout", 0.0),
        "padding": fields.take("pad_token_id", None, kind=int),
    }


def _read_llama(fields: Fields) -> LlamaConfig:
    bias = fields.take("attention_bias", False, kind=bool)
    mlp_bias = fields.take("mlp_bias", False, kind=bool)
    return LlamaConfig(**llama_fields(fields), attention_bias=bias, out_bias=bias, feed_forward_bias=mlp_bias)


def _read_mistral(fields: Fields) -> LlamaConfig:
    window = fields.take("sliding_window", None, kind=int)
    common = llama_fields(fields)
    return LlamaConfig(**common, windows=(window,) * common["layers"] if window else ())


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer of a Qwen model, or () if no layer has a window."""
    used = fields.take("use_sliding_window", False, kind=bool)
    window = fields.take("sliding_window", None, kind=int)
    first = fields.take("max_window_layers", layers, kind=int)
    kinds = fields.take("layer_types", None, kind=list)
    if kinds is None:
        kinds = ["sliding_attention" if used and i >= first else "full_attention" for i in range(layers)]
    unknown = [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]
    if unknown or len(kinds) != layers:
        raise FolderError(
            f"{fields.where} has layer_types={kinds}: expected sliding_attention or full_attention for "
            f"each of the {layers} layers"
        )
    if "sliding_attention" in kinds and not (used and window):
        raise FolderError(
            f"{fields.where} has layers with sliding_attention, but use_sliding_window={used} and "
            f"sliding_window={window}: expected use_sliding_window=true and a window size; correct "
            "these fields"
        )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _read_qwen2(fields: Fields) -> LlamaConfig:
    common = llama_fields(fields)
    return LlamaConfig(**common, attention_bias=True, windows=_windows(fields, common["layers"]))


def _read_qwen3(fields: Fields) -> LlamaConfig:
    common, bias = llama_fields(fields), fields.take("attention_bias", False, kind=bool)
    windows = _windows(fields, common["layers"])
    return LlamaConfig(**common, attention_bias=bias, out_bias=bias, qk_norm=True, windows=windows)


def _write_common(config: LlamaConfig) -> dict[str, Any]:
    assert config.rotary is not None
    return {
        "vocab_size": config.vocabulary,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_size": config.width,
        "intermediate_size": config.inner,
        "hidden_act": config.activation,
        "rms_norm_eps": config.epsilon,
        "tie_word_embeddings": config.tied,
        "attention_dropout": config.attention_dropout,
        "pad_token_id": config.padding,
        **write_rotary(config.rotary, config.head_width),
    }


def _write_llama(config: LlamaConfig) -> dict[str, Any]:
    return {
        **_write_common(config),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.feed_forward_bias,
    }


def _write_mistral(config: LlamaConfig) -> dict[str, Any]:
    return {**_write_common(config), "sliding_window": config.windows[0] if config.windows else None}


def _write_qwen(config: LlamaConfig) -> dict[str, Any]:
    window = next((window for window in config.windows if window), None)
    kinds = [
        "sliding_attention" if w else "full_attention" for w in config.windows or (None,) * config.layers
    ]
    windows = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}
    return {
        **_write_common(config),
        **windows,
        **({"attention_bias": config.attention_bias} if config.qk_norm else {}),
    }


def attention_rows(table: Table, config: LlamaConfig, ours: str, theirs: str) -> None:
    """Add the tensors of one attention module of a Llama-like model to `table`.

    `ours` and `theirs` are the prefixes of the tensor names in the model and in the folder.
    """
    query, key = config.heads * config.head_width, config.kv_heads * config.head_width
    projections = {f"{theirs}.q_proj": query, f"{theirs}.k_proj": key, f"{theirs}.v_proj": key}
    table.linears(f"{ours}.qkv", projections, bias=config.attention_bias)
    table.linear(f"{ours}.out", f"{theirs}.o_proj", bias=config.out_bias)
    if config.qk_norm:
        table.linear(f"{ours}.norm_query", f"{theirs}.q_norm")
        table.linear(f"{ours}.norm_key", f"{theirs}.k_norm")


def gated_rows(table: Table, inner: int, ours: str, theirs: str, *, bias: bool = False) -> None:
    """Add the tensors of a gated feed-forward network to `table`.

    `ours` and `theirs` are the prefixes of the tensor names in the model and in the folder.
    """
    gate_up = {f"{theirs}.gate_proj": inner, f"{theirs}.up_proj": inner}
    table.linears(f"{ours}.gate_up", gate_up, bias=bias)
    table.linear(f"{ours}.down", f"{theirs}.down_proj", bias=bias)


def decoder_table(layers: int, tied: bool) -> Table:
    """Return a tensor table with the embedding, normalizations and head of a Llama-like model."""
    ignored = (r".*rotary_emb\.inv_freq", *((r"lm_head\.weight",) if tied else ()))
    table = Table("model.", ignored)
    table.copy("0.tokens.weight", "model.embed_tokens.weight")
    for layer in range(layers):
        table.linear(f"{layer + 1}.norm_attention", f"model.layers.{layer}.input_layernorm")
        table.linear(f"{layer + 1}.norm_feed_forward", f"model.layers.{layer}.post_attention_layernorm")
    table.linear(f"{layers + 1}.norm", "model.norm")
    if not tied:
        table.copy(f"{layers + 1}.weight", "lm_head.weight")
    return table


def _llama_table(config: LlamaConfig) -> Table:
    table = decoder_table(config.layers, config.tied)
    for layer in range(config.layers):
        ours, theirs = f"{layer + 1}", f"model.layers.{layer}"
        attention_rows(table, config, f"{ours}.attention", f"{theirs}.self_attn")
        gated_rows(
            table, config.inner, f"{ours}.feed_forward", f"{theirs}.mlp", bias=config.feed_forward_bias
        )
    return table


def _rotates_heads(config: LlamaConfig) -> bool:
    """Return whether rotary positions rotate whole heads and pair the two halves of each head."""
    rotary = config.rotary
    return rotary is not None and rotary.width == config.head_width and not rotary.interleaved


def _is_llama(config: LlamaConfig) -> bool:
    return (
        _rotates_heads(config)
        and not config.windows
        and not config.qk_norm
        and config.attention_bias == config.out_bias
    )


def _is_mistral(config: LlamaConfig) -> bool:
    plain = not (config.qk_norm or config.attention_bias or config.out_bias or config.feed_forward_bias)
    return _rotates_heads(config) and plain and len(set(config.windows)) <= 1


def _is_qwen2(config: LlamaConfig) -> bool:
    plain = not (config.qk_norm or config.out_bias or config.feed_forward_bias)
    return _rotates_heads(config) and plain and config.attention_bias and _one_window(config)


def _is_qwen3(config: LlamaConfig) -> bool:
    same = config.attention_bias == config.out_bias and not config.feed_forward_bias
    return _rotates_heads(config) and config.qk_norm and same and _one_window(config)


def _one_window(config: LlamaConfig) -> bool:
    return len({window for window in config.windows if window}) <= 1


_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}

for _name, _class, _read, _write, _matches in (
    ("llama", "Llama", _read_llama, _write_llama, _is_llama),
    ("mistral", "Mistral", _read_mistral, _write_mistral, _is_mistral),
    ("qwen2", "Qwen2", _read_qwen2, _write_qwen, _is_qwen2),
    ("qwen3", "Qwen3", _read_qwen3, _write_qwen, _is_qwen3),
):
    _classes = (f"{_class}ForCausalLM", f"{_class}Model")
    FAMILIES.append(
        Architecture(
            _name,
            _classes,
            LlamaConfig,
            _read,
            _write,
            llama,
            _llama_table,
            _matches,
            defaults=_DEFAULTS.get(_name, {}),
        )
    )


# ---- Mixtral ----


def _read_mixtral(fields: Fields) -> MixtralConfig:
    window = fields.take("sliding_window", None, kind=int)
    common = llama_fields(fields)
    top = fields.size("num_experts_per_tok")
    # transformers computes one loss for all layers, which is `top` for a uniform load, and adds this loss only if the
    # model returns router logits
    coefficient = float(fields.take("router_aux_loss_coef", 0.001, kind=float))
    balanced = fields.take("output_router_logits", False, kind=bool)
    return MixtralConfig(
        **common,
        windows=(window,) * common["layers"] if window else (),
        experts=fields.size("num_local_experts"),
        top=top,
        balance=Balance(loss=coefficient * top / common["layers"]) if balanced else Balance(),
        jitter=fields.probability("router_jitter_noise", 0.0),
    )


def _write_mixtral(config: MixtralConfig) -> dict[str, Any]:
    experts = {"num_local_experts": config.experts, "num_experts_per_tok": config.top}
    router = {
        "output_router_logits": config.balance.loss > 0,
        "router_aux_loss_coef": config.balance.loss * config.layers / config.top or 0.001,
    }
    return {**_write_mistral(config), **experts, **router, "router_jitter_noise": config.jitter}


def _mixtral_table(config: MixtralConfig) -> Table:
    table = decoder_table(config.layers, config.tied)
    table.modules = ((r"\.block_sparse_moe\b", ".mlp"),)
    for layer in range(config.layers):
        ours, theirs = f"{layer + 1}.feed_forward", f"model.layers.{layer}.block_sparse_moe"
        attention_rows(table, config, f"{layer + 1}.attention", f"model.layers.{layer}.self_attn")
        table.linear(f"{ours}.router", f"{theirs}.gate")
        experts = [f"{theirs}.experts.{number}" for number in range(config.experts)]
        gate_up = [{f"{each}.{name}.weight": config.inner for name in ("w1", "w3")} for each in experts]
        table.stack(f"{ours}.experts.gate_up.weight", gate_up)
        table.stack(f"{ours}.experts.down.weight", [{f"{each}.w2.weight": config.width} for each in experts])
    return table


FAMILIES.append(
    Architecture(
        "mixtral",
        ("MixtralForCausalLM", "MixtralModel"),
        MixtralConfig,
        _read_mixtral,
        _write_mixtral,
        mixtral,
        _mixtral_table,
        lambda config: (
            _rotates_heads(config)
            and not (config.qk_norm or config.attention_bias or config.out_bias or config.feed_forward_bias)
        ),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    )
)


# ---- DeepSeek-V3 ----


def _read_deepseek(fields: Fields) -> DeepSeekConfig:
    fields.one_of("output_router_logits", False)
    fields.one_of("scoring_func", "sigmoid")
    fields.one_of("topk_method", "noaux_tc")
    fields.one_of("moe_layer_freq", 1)
    fields.one_of("ep_size", 1)
    fields.skip("qk_head_dim", "aux_loss_alpha", "seq_aux", "num_key_value_heads", "num_experts_per_tok")
    fields.skip("router_aux_loss_coef")
    rope_width = fields.size("qk_rope_head_dim")
    fields.one_of("head_dim", rope_width)
    rotary = read_rotary(fields, rope_width, interleaved=fields.take("rope_interleave", True, kind=bool))
    rope = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    scale = yarn_magnitude(rotary.factor, rope.get("mscale_all_dim") or 0.0) ** 2 if rotary.scaling else 1.0
    return DeepSeekConfig(
        vocabulary=fields.size("vocab_size"),
        layers=fields.size("num_hidden_layers"),
        heads=fields.size("num_attention_heads"),
        width=fields.size("hidden_size"),
        inner=fields.size("intermediate_size"),
        rotary=rotary,
        query_rank=fields.take("q_lora_rank", 0, kind=int),
        kv_rank=fields.size("kv_lora_rank"),
        plain_width=fields.size("qk_nope_head_dim"),
        value_width=fields.size("v_head_dim"),
        experts=fields.size("n_routed_experts"),
        expert_inner=fields.size("moe_intermediate_size"),
        top=fields.size("num_experts_per_tok"),
        dense=fields.take("first_k_dense_replace", 0, kind=int),
        shared=fields.take("n_shared_experts", 0, kind=int),
        groups=fields.size("n_group", 1),
        top_groups=fields.size("topk_group", 1),
        normalized=fields.take("norm_topk_prob", True, kind=bool),
        route_scale=fields.positive("routed_scaling_factor", 1.0),
        attention_scale=scale,
        attention_bias=fields.take("attention_bias", False, kind=bool),
        attention_dropout=fields.probability("attention_dropout", 0.0),
        activation=fields.one_of("hidden_act", "silu", *_GELU),
        epsilon=fields.positive("rms_norm_eps", 1e-6),
        tied=fields.take("tie_word_embeddings", False, kind=bool),
        predicted=fields.take("num_nextn_predict_layers", 0, kind=int),
        padding=fields.take("pad_token_id", None, kind=int),
    )


def _write_deepseek(config: DeepSeekConfig) -> dict[str, Any]:
    written = write_rotary(config.rotary, config.rotary.width)
    if config.attention_scale != 1.0:  # DeepSeek stores this factor as a field of YaRN
        rope = written["rope_parameters"]
        rope["mscale_all_dim"] = (config.attention_scale**0.5 - 1) / (
            yarn_magnitude(config.rotary.factor) - 1
        )
    return {
        "vocab_size": config.vocabulary,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "hidden_size": config.width,
        "intermediate_size": config.inner,
        "q_lora_rank": config.query_rank or None,
        "kv_lora_rank": config.kv_rank,
        "qk_nope_head_dim": config.plain_width,
        "qk_rope_head_dim": config.rotary.width,
        "rope_interleave": config.rotary.interleaved,
        "v_head_dim": config.value_width,
        "n_routed_experts": config.experts,
        "moe_intermediate_size": config.expert_inner,
        "num_experts_per_tok": config.top,
        "first_k_dense_replace": config.dense,
        "n_shared_experts": config.shared,
        "n_group": config.groups,
        "topk_group": config.top_groups,
        "norm_topk_prob": config.normalized,
        "routed_scaling_factor": config.route_scale,
        "attention_bias": config.attention_bias,
        "attention_dropout": config.attention_dropout,
        "hidden_act": config.activation,
        "rms_norm_eps": config.epsilon,
        "tie_word_embeddings": config.tied,
        "num_nextn_predict_layers": config.predicted,
        "pad_token_id": config.padding,
        **written,
    }


def _deepseek_table(config: DeepSeekConfig) -> Table:
    table = decoder_table(config.layers, config.tied)
    for layer in range(config.layers):
        _deepseek_layer(table, config, layer, f"{layer + 1}", f"model.layers.{layer}")
    for number in range(config.predicted):
        ours = f"{config.layers + 1}.predictions.{number}"
        theirs = f"model.layers.{config.layers + number}"
        table.linear(f"{ours}.layer.norm_attention", f"{theirs}.input_layernorm")
        table.linear(f"{ours}.layer.norm_feed_forward", f"{theirs}.post_attention_layernorm")
        _deepseek_layer(table, config, config.layers + number, f"{ours}.layer", theirs)
        for name, stored in (("norm_embedding", "enorm"), ("norm_hidden", "hnorm"), ("project", "eh_proj")):
            table.linear(f"{ours}.{name}", f"{theirs}.{stored}")
        table.linear(f"{ours}.norm", f"{theirs}.shared_head.norm")
        # copies of the embedding and output weights
        table.ignored += (
            rf"model\.layers\.{config.layers + number}\.(embed_tokens|shared_head\.head)\.weight",
        )
    return table


def _without_predictions(config: DeepSeekConfig, names: Collection[str]) -> DeepSeekConfig:
    """Return `config` with `predicted` set to 0 if the folder has no prediction modules."""
    # transformers does not save these modules
    stored = f"model.layers.{config.layers}.eh_proj.weight" in names
    return config if stored else replace(config, predicted=0)


def _deepseek_layer(table: Table, config: DeepSeekConfig, layer: int, ours: str, theirs: str) -> None:
    bias = config.attention_bias
    attention, stored = f"{ours}.attention", f"{theirs}.self_attn"
    if config.query_rank:
        table.linear(f"{attention}.query_down", f"{stored}.q_a_proj", bias=bias)
        table.linear(f"{attention}.norm_query", f"{stored}.q_a_layernorm")
    table.linear(f"{attention}.query", f"{stored}.q_b_proj" if config.query_rank else f"{stored}.q_proj")
    table.linear(f"{attention}.kv_down", f"{stored}.kv_a_proj_with_mqa", bias=bias)
    table.linear(f"{attention}.norm_kv", f"{stored}.kv_a_layernorm")
    table.linear(f"{attention}.kv", f"{stored}.kv_b_proj")
    table.linear(f"{attention}.out", f"{stored}.o_proj", bias=bias)
    ours, theirs = f"{ours}.feed_forward", f"{theirs}.mlp"
    if layer < config.dense:
        gated_rows(table, config.inner, ours, theirs)
        return
    inner = config.expert_inner
    table.linear(f"{ours}.router", f"{theirs}.gate")
    table.copy(f"{ours}.router.bias", f"{theirs}.gate.e_score_correction_bias")
    experts = [f"{theirs}.experts.{number}" for number in range(config.experts)]
    gate_up = [{f"{each}.{name}_proj.weight": inner for name in ("gate", "up")} for each in experts]
    table.stack(f"{ours}.experts.gate_up.weight", gate_up)
    table.stack(
        f"{ours}.experts.down.weight", [{f"{each}.down_proj.weight": config.width} for each in experts]
    )
    if config.shared:
        gated_rows(table, inner * config.shared, f"{ours}.shared", f"{theirs}.shared_experts")


FAMILIES.append(
    Architecture(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM", "DeepseekV3Model"),
        DeepSeekConfig,
        _read_deepseek,
        _write_deepseek,
        deepseek,
        _deepseek_table,
        adapt=_without_predictions,
        defaults={
            "first_k_dense_replace": 3,
            "n_group": 8,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
    )
)
