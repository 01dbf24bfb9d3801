"""LoRA: fine-tune a model by training small matrices while its weights are frozen.

A Linear layer with the frozen weight W (out, in) computes x (W + s B A)^T, where A is (rank, in), B is
(out, rank) and s = alpha / rank (Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models").

    lora = LoRA(rank=8, alpha=16, targets=("*.qkv", "*.out"))
    engine = farandole.parallelize(model, Plan(zero=2, lora=lora))      # or add_lora(model, lora) without an engine
    ...                                         # train: only the adapters have gradients
    engine.save_adapter("adapter")              # two files in PEFT format (`peft_adapter`)
    with engine.edit_parameters():
        merge(model)                            # makes inference as fast as with the base model
    remove(model)                               # plain nn.Linear layers again, with the merged weights

    load_adapter(model, "adapter")              # in another process, on the same base model

Stacked expert layers get adapters only if a target names them: `LoRA(targets=("all-linear", "*.experts.*"))`.
"""

from farandole.parallel.lora.adapters import (
    Summary,
    add_lora,
    lora_layers,
    merge,
    remove,
    summarize,
    unmerge,
)
from farandole.parallel.lora.layer import AdaptedLayer, LoRALinear, LoRAStackedLinear

__all__ = [
    "AdaptedLayer",
    "LoRALinear",
    "LoRAStackedLinear",
    "Summary",
    "add_lora",
    "lora_layers",
    "merge",
    "remove",
    "summarize",
    "unmerge",
]
