"""LoRA: a large model is fine-tuned by training small matrices beside its frozen ones.

A Linear layer with the frozen weight W (out, in) computes x (W + s B A)^T, where A is (rank, in), B is
(out, rank) and s = alpha / rank (Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models").

    summary = add_lora(model, LoRA(rank=8, alpha=16, targets=("*.qkv", "*.out")))
    print(summary)                              # 8 layers adapted: 98 k of 3.3 M parameters trained (2.98 %), ...
    ...                                         # train: only the adapters have gradients
    save_adapter(model, "adapter")              # two files, in the format of PEFT
    merge(model)                                # as fast as the model was
    remove(model)                               # plain nn.Linear layers again, with what was merged

    load_adapter(model, "adapter")              # elsewhere: the same base model, and the adapter on it

`config` says what can be asked for, `targets` finds the layers, `layer` is the layer, `quantized` its frozen
weight in 8 or 4 bits, `adapt` changes models, `files` writes and reads adapters.
"""

from __future__ import annotations

from farandole.train.lora.adapt import Summary, add_lora, merge, remove, summarize, unmerge
from farandole.train.lora.config import LoRA
from farandole.train.lora.files import AdapterError, load_adapter, save_adapter
from farandole.train.lora.layer import LoRALinear

__all__ = [
    "AdapterError",
    "LoRA",
    "LoRALinear",
    "Summary",
    "add_lora",
    "load_adapter",
    "merge",
    "remove",
    "save_adapter",
    "summarize",
    "unmerge",
]
