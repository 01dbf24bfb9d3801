"""Small models of `transformers`, and the same models in Farandole."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from farandole.models.hf import from_pretrained
from farandole.models.sequence import Transformer
from farandole.serve.engine import GenerationEngine
from farandole.serve.request import Output, Sampling
from tests.models.hf.families import folder_of, reference, rope

CONTEXT = 64
LAYERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 2, "activation_function": "gelu_new"},
    "gptj": {"n_layer": 2},
    "llama": {"num_hidden_layers": 2, "rope_parameters": rope("llama3", 8), "head_dim": 8},
    "mistral": {
        "num_hidden_layers": 2,
        "rope_parameters": rope("default", 8),
        "head_dim": 8,
        "sliding_window": 7,
    },
    "qwen3": {"num_hidden_layers": 2, "rope_parameters": rope("yarn", 4), "head_dim": 4},
    "mixtral": {
        "num_hidden_layers": 2,
        "rope_parameters": rope("default", 8),
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "deepseek_v3": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": rope("default", 8),
    },
}
"""The families that are served, with changes of their random configurations."""


@cache
def models(family: str, **changes: int) -> tuple[Any, Transformer]:
    """Return a random model of transformers, and the same model in Farandole."""
    theirs = reference(family, 3, **LAYERS[family] | changes)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # otherwise, all tokens would be equal
    folder = folder_of(theirs, Path(mkdtemp()))
    return theirs, from_pretrained(folder).eval()


def vocabulary(family: str) -> int:
    found: int = models(family)[0].config.vocab_size
    return found


def greedy(family: str, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers generates."""
    theirs, _ = models(family)
    inputs = torch.tensor([prompt])
    theirs.generation_config.eos_token_id = None
    result = theirs.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = result[0, len(prompt) :].tolist()
    return tokens


def engine_of(family: str, **options: Any) -> GenerationEngine:
    return GenerationEngine(models(family)[1], **{"context": CONTEXT, **options})


def run(engine: GenerationEngine) -> dict[tuple[int, int], list[Output]]:
    """Run until there is no work, and return the outputs of each sequence."""
    found: dict[tuple[int, int], list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault((output.request, output.choice), []).append(output)
    engine.check_idle()
    return found


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def generate(engine: GenerationEngine, prompt: list[int], **parameters: Any) -> list[Output]:
    """Run one request alone, and return the outputs of its first sequence."""
    number = engine.add(prompt, Sampling(**parameters))
    return run(engine)[number, 0]
