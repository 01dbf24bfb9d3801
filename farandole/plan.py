"""A plan: how the ranks of a job share the training of a model, and what they keep in memory meanwhile.

    Plan(data=4, zero=2, precision="bf16", recompute="block", offload="disk:/scratch")

A plan is chosen for speed or memory; what is learned stays that of one process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Recompute = Literal["none", "block", "selective", "attention", "auto"]
Offloaded = Literal["optimizer", "gradients", "parameters"]
Rounding = Literal["nearest", "stochastic"]
Compression = Literal["none", "bf16", "fp16", "int8", "topk", "powersgd"]


class PlanError(ValueError):
    """A plan that cannot be; the message says what was asked and what would do."""


@dataclass(frozen=True)
class Place:
    """Where state is kept: with the model ("none"), in host memory, or in `folder` on a disk."""

    kind: Literal["none", "host", "disk"]
    folder: str = ""

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return the place of "none", "host" or "disk:FOLDER".  Raise `PlanError` for anything else."""
        kind, _, folder = text.partition(":")
        if text == "none":
            return cls("none")
        if text == "host":
            return cls("host")
        if kind == "disk" and folder:
            return cls("disk", folder)
        raise PlanError(f"{text!r}: 'none', 'host' or 'disk:FOLDER'")


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked for; `check` says whether some number of ranks can do it.

    data: over how many ranks samples are divided; None for all there are.
    zero: what these ranks divide instead of each having all of it (Rajbhandari et al., 2020): 1 the states of the
        optimizer, 2 gradients too, 3 weights too.
    hybrid: whether the ranks of each host divide it among themselves, so that hosts have a copy each and exchange
        gradients only.
    precision: the type of the weights that the model computes with.  The optimizer keeps masters in the type that
        the model was made in, and gradients are averaged in that type.  With "fp8" weights are bf16, and linear layers
        multiply 8-bit floats (`parallel.precision`).
    recompute: which activations the backward pass computes again instead of keeping them (`memory.recompute`).
    activation_bytes: for `recompute="auto"`, how many bytes of activations may be kept.
    swap: where activations that are kept wait for the backward pass: "none" for where they are, "host" for the memory of
        the host (models on an accelerator), "disk:FOLDER" for a disk (models on a CPU) (`memory.swap`).
    offload: where the masters and states of the optimizer are kept, which only its step needs: "none" for beside the
        model, "host" for the memory of the host (of use to models on an accelerator), or "disk:FOLDER".
    offloaded: what is kept there besides: "gradients", with `zero` >= 2, or "parameters" too, with `zero=3`; for models on an
        accelerator in the memory of the host only.
    rounding: how what the optimizer computes becomes bf16 weights.  With "stochastic" there are no masters, which saves
        4 bytes per parameter (`parallel.optimizers.rounding`).
    compression: of the gradients that hosts exchange, with `zero=0` (`comm.compression`).  Gradients are then no longer those
        of one process: error feedback adds what a step omits to later steps.
    lora: the small matrices that are trained in place of the model's weights, which are frozen (`parallel.lora`).
    """

    data: int | None = None
    zero: int = 0
    hybrid: bool = False
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    activation_bytes: int | None = None
    swap: str = "none"
    offload: str = "none"
    offloaded: Offloaded = "optimizer"
    rounding: Rounding = "nearest"
    compression: Compression = "none"
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        if self.data is not None and self.data < 1:
            raise PlanError(f"data={self.data}: an axis has 1 rank or more")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero={self.zero}: the stages are 0, 1, 2 and 3")
        if self.hybrid and not self.zero:
            raise PlanError("hybrid=True with zero=0: nothing is divided; nearest plan: zero=1")
        _one_of("precision", self.precision, get_args(Precision))
        _one_of("rounding", self.rounding, get_args(Rounding))
        _one_of("recompute", self.recompute, get_args(Recompute))
        _one_of("compression", self.compression, get_args(Compression))
        if self.compression != "none" and self.zero:
            raise PlanError(
                f"compression={self.compression!r} with zero={self.zero}: whole gradients are compressed; nearest plan: "
                f"zero=0, or compression='none'"
            )
        if self.rounding == "stochastic" and self.precision != "bf16":
            raise PlanError(
                f"rounding='stochastic' with precision={self.precision!r}: it is for bf16; nearest plan: "
                f"precision='bf16'"
            )
        if self.rounding == "stochastic" and self.offload != "none":
            raise PlanError(
                f"rounding='stochastic' with offload={self.offload!r}: what it updates stays in memory, and has no masters; "
                f"nearest plan: rounding='nearest'"
            )
        if (self.recompute == "auto") != (self.activation_bytes is not None):
            raise PlanError(
                f"recompute={self.recompute!r} with activation_bytes={self.activation_bytes}: 'auto' needs the "
                f"bytes of activations that may be kept, and nothing else takes them"
            )
        if self.lora is not None and self.precision == "fp8":
            raise PlanError(
                "lora with precision='fp8': adapted layers do not multiply 8-bit floats; nearest plan: precision='bf16'"
            )
        if self.activation_bytes is not None and self.activation_bytes < 1:
            raise PlanError(f"activation_bytes={self.activation_bytes}: 1 byte or more")
        self._check_places()

    def _check_places(self) -> None:
        for name, place in (("offload", self.offload), ("swap", self.swap)):
            try:
                Place.parse(place)
            except PlanError as error:
                raise PlanError(f"{name}={error}") from None
        _one_of("offloaded", self.offloaded, get_args(Offloaded))
        if self.offloaded == "optimizer":
            return
        if self.offload == "none":
            raise PlanError(
                f"offloaded={self.offloaded!r} with offload='none': gradients and parameters go where the states of the optimizer "
                f"go; nearest plan: offload='disk:FOLDER'"
            )
        least = 2 if self.offloaded == "gradients" else 3
        if self.zero < least:
            raise PlanError(
                f"offloaded={self.offloaded!r} with zero={self.zero}: ranks have to divide what they offload; nearest "
                f"plan: zero={least}"
            )

    @property
    def offload_folder(self) -> str | None:
        """The folder on a disk to which is offloaded, if it is one."""
        return Place.parse(self.offload).folder or None

    def check(self, ranks: int) -> None:
        """Raise `PlanError` unless the plan is one for `ranks` ranks."""
        if self.data is not None and self.data != ranks:
            raise PlanError(
                f"data={self.data}: the plan needs data={self.data} ranks, {ranks} were launched; nearest plan: data={ranks}"
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PlanError(f"{name}={value!r}: one of {', '.join(allowed)}")
