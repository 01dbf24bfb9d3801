"""Random small models of `transformers` for each family, as folders."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests import torchvision_models  # isort: skip  # must be imported before transformers  # noqa: F401
import torch
import transformers

ROPES: Mapping[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 24.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
"""Rotary positions, whose original context is at most 64 positions."""


def rope(kind: str, width: int) -> dict[str, Any]:
    """Return the rotary positions `kind` for heads with `width` values."""
    found = dict(ROPES[kind])
    if kind == "longrope":
        found["short_factor"] = [1 + 0.1 * pair for pair in range(width // 2)]
        found["long_factor"] = [2 + 0.5 * pair for pair in range(width // 2)]
    return found


def _decoder(choose: random.Random) -> dict[str, Any]:
    kv_heads, head_width = choose.choice([1, 2, 3]), choose.choice([4, 8])
    return {
        "vocab_size": choose.randint(50, 130),
        "hidden_size": 12 * choose.choice([2, 4]),
        "intermediate_size": choose.randint(10, 70),
        "num_hidden_layers": choose.randint(1, 3),
        "num_attention_heads": kv_heads * choose.choice([1, 2, 4]),
        "num_key_value_heads": kv_heads,
        "head_dim": head_width,
        "max_position_embeddings": 64,
        "rope_parameters": rope(choose.choice(list(ROPES)), head_width),
        "tie_word_embeddings": choose.random() < 0.5,
        "rms_norm_eps": choose.choice([1e-5, 1e-6]),
        "pad_token_id": None,
    }


def _gpt2(choose: random.Random) -> dict[str, Any]:
    return {
        "vocab_size": choose.randint(50, 130),
        "n_positions": 64,
        "n_embd": 24,
        "n_layer": choose.randint(1, 3),
        "n_head": choose.choice([1, 2, 4]),
        "n_inner": choose.choice([None, 40]),
        "activation_function": choose.choice(["gelu_new", "relu", "gelu"]),
        "attn_pdrop": 0.1,
    }


def _gptj(choose: random.Random) -> dict[str, Any]:
    return {
        "vocab_size": choose.randint(50, 130),
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": choose.randint(1, 3),
        "n_head": 2,
        "rotary_dim": choose.choice([4, 8, 16]),
        "n_inner": choose.choice([None, 40]),
        "tie_word_embeddings": choose.random() < 0.3,
    }


def _llama(choose: random.Random) -> dict[str, Any]:
    return {
        **_decoder(choose),
        "attention_bias": choose.random() < 0.3,
        "mlp_bias": choose.random() < 0.3,
    }


def _mistral(choose: random.Random) -> dict[str, Any]:
    return {**_decoder(choose), "sliding_window": choose.choice([None, 3, 7])}


def _qwen(choose: random.Random) -> dict[str, Any]:
    windows = choose.random() < 0.5
    return {
        **_decoder(choose),
        "use_sliding_window": windows,
        "sliding_window": 5 if windows else None,
        "max_window_layers": 1,
    }


def _mixtral(choose: random.Random) -> dict[str, Any]:
    return {
        **_mistral(choose),
        "num_local_experts": choose.choice([3, 8]),
        "num_experts_per_tok": choose.choice([1, 2, 3]),
    }


def _deepseek(choose: random.Random) -> dict[str, Any]:
    heads, groups = choose.choice([1, 2, 4]), choose.choice([1, 4])
    return {
        "vocab_size": choose.randint(50, 130),
        "hidden_size": 32,
        "intermediate_size": choose.randint(10, 70),
        "moe_intermediate_size": choose.randint(5, 20),
        "num_hidden_layers": 3,
        "first_k_dense_replace": choose.choice([0, 1]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": choose.choice([1, 2]),
        "n_routed_experts": 8,
        "n_group": groups,
        "topk_group": min(groups, choose.choice([1, 2, 2])),
        "num_experts_per_tok": 2,
        "q_lora_rank": choose.choice([None, 12]),
        "kv_lora_rank": choose.choice([8, 16]),
        "qk_nope_head_dim": choose.choice([4, 8]),
        "qk_rope_head_dim": 8,
        "v_head_dim": choose.choice([4, 12]),
        "norm_topk_prob": choose.random() < 0.5,
        "attention_bias": choose.random() < 0.3,
        "max_position_embeddings": 64,
        "rope_parameters": rope(choose.choice(list(ROPES)), 8),
        "rope_interleave": choose.random() < 0.7,
        "tie_word_embeddings": choose.random() < 0.3,
        "pad_token_id": None,
    }


def _bert(choose: random.Random) -> dict[str, Any]:
    return {
        "vocab_size": choose.randint(50, 130),
        "hidden_size": 24,
        "num_hidden_layers": choose.randint(1, 3),
        "num_attention_heads": choose.choice([1, 2, 4]),
        "intermediate_size": choose.randint(10, 70),
        "max_position_embeddings": 64,
        "hidden_act": choose.choice(["gelu", "relu"]),
    }


def _vit(choose: random.Random) -> dict[str, Any]:
    patch = choose.choice([2, 4])
    return {
        "hidden_size": 24,
        "num_hidden_layers": choose.randint(1, 3),
        "num_attention_heads": choose.choice([1, 2, 4]),
        "intermediate_size": choose.randint(10, 70),
        "image_size": patch * choose.randint(2, 4),
        "patch_size": patch,
        "num_channels": choose.choice([1, 3]),
        "qkv_bias": choose.random() < 0.7,
        "num_labels": choose.randint(2, 9),
    }


def _t5(choose: random.Random) -> dict[str, Any]:
    return {
        "vocab_size": choose.randint(50, 130),
        "d_model": 24,
        "d_kv": choose.choice([4, 8]),
        "d_ff": choose.randint(10, 70),
        "num_layers": choose.randint(1, 3),
        "num_decoder_layers": choose.randint(1, 3),
        "num_heads": choose.choice([1, 3]),
        "relative_attention_num_buckets": choose.choice([8, 32]),
        "relative_attention_max_distance": choose.choice([20, 128]),
        "feed_forward_proj": choose.choice(["relu", "gated-gelu"]),
        "decoder_start_token_id": 0,
    }


FAMILIES: Mapping[str, tuple[str, str, Callable[[random.Random], dict[str, Any]]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _gpt2),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _gptj),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _llama),
    "mistral": ("MistralConfig", "MistralForCausalLM", _mistral),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _qwen),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _qwen),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _mixtral),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _deepseek),
    "bert": ("BertConfig", "BertForMaskedLM", _bert),
    "bert-classifier": ("BertConfig", "BertForSequenceClassification", _bert),
    "vit": ("ViTConfig", "ViTForImageClassification", _vit),
    "t5": ("T5Config", "T5ForConditionalGeneration", _t5),
}
DECODERS = ("gpt2", "gptj", "llama", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3")


def reference(family: str, seed: int, **changes: Any) -> Any:
    """Return a random model of transformers in evaluation mode, with random values in all tensors."""
    config_class, model_class, options = FAMILIES[family]
    config = getattr(transformers, config_class)(**(options(random.Random(f"{family}{seed}")) | changes))
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                0.1 * torch.randn_like(parameter) + ("norm" in name.lower() and parameter.dim() == 1)
            )
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return model


def folder_of(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model of transformers, and return the folder."""
    model.save_pretrained(folder, **options)
    return folder
