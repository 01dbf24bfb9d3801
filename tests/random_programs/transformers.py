"""Random transformers of the built-in language-model families, and their samples."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from farandole.models.bert import BERTConfig, build_bert
from farandole.models.deepseek import DeepSeekConfig, build_deepseek
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.gptj import GPTJConfig, build_gptj
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import Balance
from farandole.models.rotary import Rotary
from farandole.models.sequence import SequenceInfo, Transformer
from farandole.models.t5 import T5Config, build_t5

CAUSAL = ("gpt", "llama", "gptj", "mixtral", "deepseek")
EXPERTS = ("mixtral", "deepseek")
FAMILIES = (*CAUSAL, "bert", "t5")
LONGEST = 16

Batch = tuple[Any, SequenceInfo | None, Tensor]  # the arguments of a model: inputs, info and targets


def vocabulary_of(seed: int) -> int:
    return random.Random(seed).choice([5, 11, 29, 32])


def random_transformer(family: str, seed: int) -> Transformer:
    """Return a small model with unusual sizes; the same model for each `seed`."""
    choose, words, layers = random.Random(seed), vocabulary_of(seed), 2
    torch.manual_seed(seed)
    heads, width = choose.choice([2, 3, 4, 6]), choose.choice([2, 4, 6])
    kv_heads = choose.choice([number for number in range(1, heads + 1) if heads % number == 0])
    activation, inner = choose.choice(["gelu", "relu2", "silu"]), choose.choice([5, 16, 31])
    tied, bias, padding = choose.random() < 0.5, choose.random() < 0.5, choose.choice([None, 0])
    balance = Balance(loss=choose.choice([0, 0.5]))
    llama: dict[str, Any] = {
        "kv_heads": kv_heads, "head_width": width, "attention_bias": bias, "qk_norm": choose.random() < 0.3,
        "windows": choose.choice([(), (None, 3)]), "activation": activation, "tied": tied, "padding": padding,
    }  # fmt: skip
    if family == "gpt":
        positions = choose.choice(["rotary", "learned"])
        config = GPTConfig(
            words, LONGEST, layers, heads, heads * width, positions=positions, inner=inner, tied=tied
        )
        model = build_gpt(config)
    elif family == "llama":
        model = build_llama(LlamaConfig(words, layers, heads, 12, inner, feed_forward_bias=bias, **llama))
    elif family == "gptj":
        model = build_gptj(GPTJConfig(words, layers, heads, heads * 4, rotary=2))
    elif family == "mixtral":
        model = build_mixtral(
            MixtralConfig(words, layers, heads, 12, inner, experts=4, top=2, balance=balance, **llama)
        )
    elif family == "deepseek":
        model = build_deepseek(
            DeepSeekConfig(
                words, layers=layers, heads=heads, width=16, inner=inner, rotary=Rotary(4), query_rank=choose.choice([0, 8]),
                kv_rank=8, plain_width=4, value_width=6, experts=4, expert_inner=5, top=2, dense=choose.choice([0, 1]),
                predicted=choose.choice([0, 1]), balance=balance,
            )
        )  # fmt: skip
    elif family == "bert":
        model = build_bert(BERTConfig(words, LONGEST, layers, heads, heads * width, padding=padding))
    else:
        model = build_t5(T5Config(words, 1, 2, heads, 12, width, inner, dropout=0.0, tied=tied))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and normalizations too
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def random_batches(family: str, seed: int, step: int, replica: int) -> list[Batch]:
    """Return the micro-batches of a replica, with padding, masked targets and packed documents."""
    every = random.Random(f"{seed} {step}")
    words, samples, length = vocabulary_of(seed), every.choice([1, 2, 4]), every.choice([4, 8, 9, 13])
    has_documents = family in CAUSAL and random.Random(seed).random() < 0.3
    generator = torch.Generator().manual_seed(random.Random(f"{seed} {step} {replica}").randrange(1 << 30))
    batches: list[Batch] = []
    for _ in range(every.randint(1, 3)):
        tokens = torch.randint(1, words, (samples, length), generator=generator)
        targets = torch.randint(0, words, tokens.shape, generator=generator)
        targets[torch.rand(tokens.shape, generator=generator) < 0.3] = -1
        targets[0, 0] = 1
        info = None
        if has_documents:
            info = SequenceInfo(documents=torch.randint(0, 3, tokens.shape, generator=generator).sort(1)[0])
        elif every.random() < 0.5:
            tokens[-1, -2:], targets[-1, -2:] = 0, -1  # padding, if the model has it
        batches.append(((tokens, tokens.flip(1)) if family == "t5" else tokens, info, targets))
    return batches
