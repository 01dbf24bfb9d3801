"""What can be asked for of LoRA."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

ALL_LINEAR = "all-linear"
"""The target that means every plain `nn.Linear`, as in PEFT."""

Pattern = str | re.Pattern[str]
Bias = Literal["none", "lora_only", "all"]
Base = Literal["int8", "int4", "nf4"]


@dataclass(frozen=True)
class LoRA:
    """Which layers get an adapter, and which one.

    `targets` names the layers, and `also_train` modules that are trained whole beside the adapters, as PEFT's
    `modules_to_save` (layers within them get no adapter). Each is one pattern or several:

    - a name: the module of this path, or whose path ends with it after a dot (`"qkv"` is `1.attention.qkv`);
    - a glob for the whole path, in which `*` crosses dots (`"*.attention.*"`); `"*.qkv"` is also a `qkv` at the top;
    - a compiled regular expression for the whole path;
    - `"all-linear"` (of targets): every plain `nn.Linear`.

    `alpha / rank` multiplies the update, with `use_rslora` alpha / sqrt(rank) (Kalajdzievski, 2023, "A Rank
    Stabilization Scaling Factor for Fine-Tuning with LoRA"). `dropout` is of what goes into the adapter. `bias`
    says which biases of the model are trained: none, those of the adapted layers, or all.

    `base` keeps the frozen weights of the adapted layers in less memory, through torchao: `"int8"`, `"nf4"` (4 bits;
    Dettmers et al., 2023, "QLoRA: Efficient Finetuning of Quantized LLMs") or `"int4"` where torchao has it. The
    other layers stay as they are.

    Raises TypeError and ValueError for what cannot be meant.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: Pattern | Sequence[Pattern] = ALL_LINEAR
    dropout: float = 0.0
    use_rslora: bool = False
    bias: Bias = "none"
    also_train: Pattern | Sequence[Pattern] = ()
    base: Base | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise TypeError(f"LoRA rank={self.rank!r}: an integer, 1 or more, is needed")
        for name, number in (("alpha", self.alpha), ("dropout", self.dropout)):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise TypeError(f"LoRA {name}={number!r}: a number is needed")
        if self.rank < 1:
            raise ValueError(f"LoRA rank={self.rank}: it must be 1 or more")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(
                f"LoRA alpha={self.alpha}: it must be a number above 0; twice the rank is common"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA dropout={self.dropout}: it must be at least 0 and less than 1")
        if self.bias not in get_args(Bias):
            raise ValueError(f"LoRA bias={self.bias!r}: it must be one of {', '.join(get_args(Bias))}")
        if self.base is not None and self.base not in get_args(Base):
            raise ValueError(
                f"LoRA base={self.base!r}: it must be None or one of {', '.join(get_args(Base))}"
            )
        if not as_patterns("targets", self.targets):
            raise ValueError(
                f"LoRA targets={self.targets!r} names no layer; {ALL_LINEAR!r} means every nn.Linear"
            )
        as_patterns("also_train", self.also_train)

    @property
    def scaling(self) -> float:
        """What multiplies B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def as_patterns(option: str, given: Pattern | Sequence[Pattern]) -> tuple[Pattern, ...]:
    """One pattern or several, as several; `option` is what the user calls them."""
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for pattern in several:
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(f"LoRA {option}: {pattern!r} is neither a name, a glob nor a regular expression")
        if pattern == "":
            raise ValueError(f"LoRA {option}: an empty name")
    return several
