"""Folders of small models with tokenizers, as users have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.models.hf.families import folder_of, reference, rope

CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog", "bird", "sun", "moon")


def conversations(count: int, turns: int = 1) -> list[dict[str, Any]]:
    """Return conversations in which the assistant repeats the last word of the user twice."""
    found = []
    for number in range(count):
        messages = []
        for turn in range(turns):
            word = WORDS[(number * 7 + turn * 3) % len(WORDS)]
            other = WORDS[(number + turn) % len(WORDS)]
            messages.append({"role": "user", "content": f"say {other} {word}"})
            messages.append({"role": "assistant", "content": f"{word} {word}"})
        found.append({"messages": messages})
    return found


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def add_tokenizer(folder: Path, vocabulary: int, *, bert: bool = False) -> None:
    """Write a byte-level tokenizer with a chat template, or with the special tokens of BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] if bert else ["<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS) + " say <|user|> <|assistant|>"] * 3, trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT}
    if bert:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        names = {"pad_token": "[PAD]", "cls_token": "[CLS]"}
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


SCALED = ("dynamic", "longrope")
"""The scalings of rotary positions that depend on the length of the sequences."""


def config_folder(folder: Path, scaling: str) -> Path:
    """Write a folder with the configuration of a Llama whose rotary positions have this scaling, without weights."""
    sizes = {"vocab_size": 300, "hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = reference("llama", 5, **sizes, head_dim=8, rope_parameters=rope(scaling, 8))
    model.config.save_pretrained(folder)
    return folder


def model_with_tokenizer(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Write a folder of a random model with a tokenizer of 300 tokens."""
    sizes: dict[str, Any] = {"vocab_size": 300}
    if family in ("llama", "mixtral"):
        sizes |= {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    if family == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    folder_of(reference(family, 5, **(sizes | changes)), folder)
    add_tokenizer(folder, 300, bert=family.startswith("bert"))
    return folder
