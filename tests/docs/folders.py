"""Hugging Face folders for the programs of the documentation, written once although every rank calls the functions."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from farandole.models.hf import save_pretrained
from farandole.models.llama import LlamaConfig, build_llama


def write_llama(name: str, text: str) -> None:
    """Write a small Llama with a tokenizer as folder `name`, and a text, if this is rank 0; return when both are
    complete."""
    folder = Path(name)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.manual_seed(0)
        config = LlamaConfig(vocabulary=256, layers=2, heads=4, kv_heads=2, width=64, inner=96)
        tokenizer = Tokenizer(BPE({chr(code): code - 32 for code in range(32, 127)}, []))
        Path(text).write_text("All ranks train one model. " * 20)
        partial = folder.with_suffix(".new")
        save_pretrained(build_llama(config), partial)
        tokenizer.save(str(partial / "tokenizer.json"))
        partial.rename(folder)
    while not folder.exists():
        time.sleep(0.01)
