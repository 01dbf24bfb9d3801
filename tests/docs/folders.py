"""Hugging Face folders for the programs of the documentation, written once although every rank calls the functions."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from farandole.models.hf import save_pretrained
from farandole.models.llama import LlamaConfig, build_llama


def write_llama(name: str) -> None:
    """Write a small Llama as folder `name`, if this is rank 0; return when it is complete."""
    folder = Path(name)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.manual_seed(0)
        config = LlamaConfig(vocabulary=256, layers=2, heads=4, kv_heads=2, width=64, inner=96)
        save_pretrained(build_llama(config), folder)
    while not folder.exists():
        time.sleep(0.01)
