"""A plan: how a job shards training states, and how it saves memory.

    Plan(data=4, zero=2, precision="bf16", recompute="block", offload="disk:/scratch")

Sharding, recomputation, swapping and offloading change speed and memory, but not the training result except for
rounding.  `precision`, `rounding`, `compression`, `deferred_batch_norm` and `lora` also change the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from farandole._troubleshooting import Documented

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Recompute = Literal["none", "block", "selective", "attention", "auto"]
Offloaded = Literal["optimizer", "gradients", "parameters"]
Rounding = Literal["nearest", "stochastic"]
Compression = Literal["none", "bf16", "fp16", "int8", "topk", "powersgd"]
DataShard = int | Literal["all", "host"]


MODEL_AXES = ("context", "expert", "tensor")
"""The axes along which parts of the model or of a sample differ, from the outermost to the innermost."""


class PlanError(Documented, ValueError):
    """Raised for an invalid plan; the message contains the field, its value and usually the nearest valid plan."""

    _section = "planerror"


@dataclass(frozen=True)
class Place:
    """A storage location: with the model ("none"), in host memory, or in `folder` on a disk."""

    kind: Literal["none", "host", "disk"]
    folder: str = ""

    @classmethod
    def parse(cls, text: str) -> Place:
        """Parse "none", "host" or "disk:FOLDER".  Raise `PlanError` for any other text."""
        kind, _, folder = text.partition(":")
        if text == "none":
            return cls("none")
        if text == "host":
            return cls("host")
        if kind == "disk" and folder:
            return cls("disk", folder)
        raise PlanError(f"{text!r}: expected 'none', 'host' or 'disk:FOLDER'")


ALL_LINEAR = "all-linear"
"""The target for every plain `nn.Linear`, as in PEFT."""

Pattern = str | re.Pattern[str]
Bias = Literal["none", "lora_only", "all"]
Base = Literal["int8", "int4", "nf4"]


@dataclass(frozen=True)
class LoRA:
    """Options for LoRA: low-rank adapters for linear layers (Hu et al., 2021).

    A pattern in `targets` or `also_train` is one of:

    - a name: matches the module with this path, and modules whose paths end with a dot and this name (`"qkv"` matches
      `1.attention.qkv`);
    - a glob for the whole path, in which `*` also matches dots (`"*.attention.*"`); `"*.qkv"` also matches a top-level
      `qkv`;
    - a compiled regular expression for the whole path;
    - `"all-linear"` (for targets): every plain `nn.Linear`.

    `"*.experts.*"` matches the stacked layers of experts; each expert then has its own adapter.

    Args:
        rank: the rank of the adapters.
        alpha: the scale of the update; the product B A is multiplied by `alpha / rank`.
        targets: one or more patterns for the layers to adapt.
        dropout: the dropout rate for the adapters' inputs.
        use_rslora: whether the product is multiplied by `alpha / sqrt(rank)` instead (Kalajdzievski, 2023, "A Rank
            Stabilization Scaling Factor for Fine-Tuning with LoRA").
        bias: the biases to train: "none", only the biases of adapted layers ("lora_only"), or "all".
        also_train: modules to train in full, like PEFT's `modules_to_save`; layers inside these modules get no adapter.
        base: the format in which torchao stores the frozen weights of adapted layers: "int8", "nf4" (4 bits; Dettmers
            et al., 2023, "QLoRA: Efficient Finetuning of Quantized LLMs"), or "int4" where torchao supports it.

    Raises:
        TypeError, ValueError: for invalid options.
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
            raise TypeError(f"LoRA rank={self.rank!r}: expected an integer of at least 1")
        for name, number in (("alpha", self.alpha), ("dropout", self.dropout)):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise TypeError(f"LoRA {name}={number!r}: expected a number")
        if self.rank < 1:
            raise ValueError(f"LoRA rank={self.rank}: expected at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(
                f"LoRA alpha={self.alpha}: expected a finite number above 0; a common value is twice the rank"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA dropout={self.dropout}: expected at least 0 and less than 1")
        if self.bias not in get_args(Bias):
            raise ValueError(f"LoRA bias={self.bias!r}: expected one of {', '.join(get_args(Bias))}")
        if self.base is not None and self.base not in get_args(Base):
            raise ValueError(f"LoRA base={self.base!r}: expected None or one of {', '.join(get_args(Base))}")
        if not as_patterns("targets", self.targets):
            raise ValueError(
                f"LoRA targets={self.targets!r}: expected at least one pattern; {ALL_LINEAR!r} matches every nn.Linear"
            )
        as_patterns("also_train", self.also_train)

    @property
    def scaling(self) -> float:
        """The factor by which the product B A is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def as_patterns(option: str, given: Pattern | Sequence[Pattern]) -> tuple[Pattern, ...]:
    """Return one or more patterns as a tuple.

    Args:
        option: the name of the LoRA option, for error messages.

    Raises:
        TypeError, ValueError: if a pattern has the wrong type or is empty.
    """
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for pattern in several:
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(
                f"LoRA {option}: expected a name, a glob or a regular expression, got {pattern!r}"
            )
        if pattern == "":
            raise ValueError(f"LoRA {option}: expected a name, got an empty string")
    return several


_OF_AXES = ("schedule", "stage_bytes", "deferred_batch_norm", "sequence", "ring")
"""The fields of `Plan` that apply only to an axis of more than one rank."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A parallelization plan: how training states are sharded, and how memory is saved.

    Args:
        data: the number of groups of ranks over which samples are distributed; by default, as many as possible.
        pipeline: the number of ranks over which the stages of the model are distributed (`parallel.pipeline`).
        schedule: with `pipeline` > 1, the name of the schedule of forward and backward passes; `farandole schedule`
            lists the names.
        stage_bytes: with `pipeline` > 1, the maximum number of bytes on a rank for the parameters of its stages and for
            the activations of the micro-batches in flight.  Among the divisions into stages that fit, the fastest one
            is used.
        deferred_batch_norm: with `pipeline` > 1, whether to update the running statistics of BatchNorm once per step,
            with the mean and variance over all samples of the step, instead of once per micro-batch
            (`parallel.pipeline.batch_norm`).
        tensor: the number of ranks that compute each layer together (`parallel.tensor`).
        sequence: with `tensor` > 1, whether the tokens are also split over these ranks between the layers' matrix
            products, which saves activation memory.
        context: the number of ranks over which each sequence is split (`parallel.context`).
        ring: the number of ranks in a ring, in which keys and values circulate; heads are exchanged between rings.  By
            default, the smallest possible number.
        expert: the number of ranks over which the experts of a mixture of experts are distributed; these ranks have
            different samples (`parallel.expert`).
        zero: the ZeRO stage (Rajbhandari et al., 2020): 1 shards optimizer states, 2 also gradients, 3 also weights.
        data_shard: with `zero` >= 1, the size of the groups of ranks on the data axis that shard states among
            themselves; each group stores all states once.  "all" shards over the whole axis, and "host" among the ranks
            on each host, so that hosts exchange only gradients.
        precision: the dtype in which the model computes.  The optimizer updates master weights in the dtype in which
            the model was created (at least fp32), and gradients are averaged in that dtype.  With "fp8", weights are
            stored in bf16, and linear layers multiply 8-bit floats.
        recompute: the activations that are recomputed in the backward pass.
        activation_bytes: with `recompute="auto"`, the maximum number of bytes of activations that a rank keeps.
        swap: where activations are stored until the backward pass: "none" (on the device of the model), "host" (for
            models on an accelerator) or "disk:FOLDER" (for models on a CPU).
        offload: where master weights and optimizer states are stored between steps: "none" (with the model), "host"
            (for models on an accelerator) or "disk:FOLDER".
        offloaded: the data to offload in addition to optimizer states: "gradients" (with `zero` >= 2), or
            "parameters" (with `zero=3`), which includes gradients.  For models on an accelerator, both can be
            offloaded only to the host.
        rounding: the rounding of updated weights to bf16.  With "stochastic", there are no master weights, which saves
            4 bytes per parameter.
        compression: the compression of the gradients that hosts exchange; requires `zero=0`.  Compressed gradients
            are approximate; error feedback adds the error of a step to the gradients of the next step.
        lora: the adapters to train, with the model's weights frozen.

    Raises:
        PlanError: if options are invalid or conflict.
    """

    data: int | None = None
    pipeline: int = 1
    schedule: str = "1f1b"
    stage_bytes: int | None = None
    deferred_batch_norm: bool = False
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    ring: int | None = None
    expert: int = 1
    zero: int = 0
    data_shard: DataShard = "all"
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
        for axis in ("data", "pipeline", *MODEL_AXES):
            size = getattr(self, axis)
            if size is not None and size < 1:
                raise PlanError(f"{axis}={size}: expected at least 1 rank")
        if self.schedule != "1f1b" and self.pipeline == 1:
            raise PlanError(
                f"schedule={self.schedule!r} with pipeline=1: a single stage needs no schedule; nearest plan: "
                "schedule='1f1b', or pipeline=2"
            )
        if self.stage_bytes is not None:
            self._check_stage_bytes(self.stage_bytes)
        if self.deferred_batch_norm and self.pipeline == 1:
            raise PlanError(
                "deferred_batch_norm=True with pipeline=1: only pipelines defer running statistics; nearest plan: "
                "deferred_batch_norm=False, or pipeline=2"
            )
        if self.sequence and self.tensor == 1:
            raise PlanError(
                "sequence=True with tensor=1: sequence parallelism splits the tokens over tensor-parallel ranks; "
                "nearest plan: sequence=False, or tensor=2"
            )
        if self.ring is not None and (self.ring < 1 or self.context % self.ring):
            divisors = [n for n in range(1, self.context + 1) if self.context % n == 0]
            raise PlanError(
                f"ring={self.ring}: expected a positive divisor of context={self.context}; nearest plan: "
                f"ring={min(divisors, key=lambda n: abs(n - (self.ring or 1)))}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero={self.zero}: expected stage 0, 1, 2 or 3")
        if self.zero == 3 and self.pipeline > 1:
            near = "zero=2, offloaded='gradients'" if self.offloaded == "parameters" else "zero=2"
            raise PlanError(
                f"zero=3 with pipeline={self.pipeline}: not supported, because weights would be gathered twice for "
                f"each micro-batch; nearest plan: {near}"
            )
        if self.data_shard not in ("all", "host") and not (
            isinstance(self.data_shard, int) and self.data_shard >= 1
        ):
            raise PlanError(f"data_shard={self.data_shard!r}: expected 'all', 'host', or at least 1 rank")
        if self.data_shard != "all" and not self.zero:
            raise PlanError(
                f"data_shard={self.data_shard!r} with zero=0: no states are sharded; nearest plan: "
                f"{self._with_zero(1)}"
            )
        if self.data is not None:
            self._check_data_shard(self.data)
        _one_of("precision", self.precision, get_args(Precision))
        _one_of("rounding", self.rounding, get_args(Rounding))
        _one_of("recompute", self.recompute, get_args(Recompute))
        _one_of("compression", self.compression, get_args(Compression))
        if self.compression != "none" and self.zero:
            raise PlanError(
                f"compression={self.compression!r} with zero={self.zero}: only whole gradients can be compressed; nearest plan: "
                f"zero=0, or compression='none'"
            )
        if self.rounding == "stochastic" and self.precision != "bf16":
            raise PlanError(
                f"rounding='stochastic' with precision={self.precision!r}: stochastic rounding needs bf16; nearest plan: "
                f"precision='bf16'"
            )
        if self.rounding == "stochastic" and self.offload != "none":
            raise PlanError(
                f"rounding='stochastic' with offload={self.offload!r}: stochastic rounding has no master "
                "weights to offload; "
                f"nearest plan: rounding='nearest'"
            )
        if self.recompute == "auto" and self.activation_bytes is None:
            raise PlanError(
                "recompute='auto' needs activation_bytes, the maximum bytes of activations per rank; nearest plan: "
                "recompute='block'"
            )
        if self.recompute != "auto" and self.activation_bytes is not None:
            raise PlanError(
                f"activation_bytes={self.activation_bytes} with recompute={self.recompute!r}: only recompute='auto' uses "
                f"activation_bytes; nearest plan: activation_bytes=None"
            )
        if self.lora is not None and self.precision == "fp8":
            raise PlanError(
                "lora with precision='fp8': layers with adapters do not support fp8; nearest plan: precision='bf16'"
            )
        if self.activation_bytes is not None and self.activation_bytes < 1:
            raise PlanError(f"activation_bytes={self.activation_bytes}: expected at least 1")
        self._check_places()

    def _check_stage_bytes(self, stage_bytes: int) -> None:
        if stage_bytes < 1:
            raise PlanError(f"stage_bytes={stage_bytes}: expected at least 1")
        if self.pipeline == 1:
            raise PlanError(
                f"stage_bytes={stage_bytes} with pipeline=1: stage_bytes applies only to the division into stages; "
                "nearest plan: stage_bytes=None, or pipeline=2"
            )
        if self.recompute == "auto":
            raise PlanError(
                f"stage_bytes={stage_bytes} is not supported with recompute='auto', which takes its limit from "
                "activation_bytes; nearest plan: recompute='block', or stage_bytes=None"
            )

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
                f"offloaded={self.offloaded!r} with offload='none': gradients and parameters are offloaded only "
                f"together with optimizer states; nearest plan: offload='disk:FOLDER'"
            )
        least = 2 if self.offloaded == "gradients" else 3
        if self.zero < least:
            piped = least == 3 and self.pipeline > 1  # pipelines do not support zero=3
            near = f"{self._with_zero(2)}, offloaded='gradients'" if piped else self._with_zero(least)
            raise PlanError(
                f"offloaded={self.offloaded!r} with zero={self.zero}: only sharded gradients and parameters can be "
                f"offloaded; nearest plan: {near}"
            )

    def _with_zero(self, stage: int) -> str:
        """Return the options that select ZeRO stage `stage` (at least 1), for an error message."""
        return f"zero={stage}" + (", compression='none'" if self.compression != "none" else "")

    @property
    def ranks_per_sample(self) -> int:
        """The number of ranks that process each sample."""
        return self.pipeline * self.context * self.tensor

    @property
    def offload_folder(self) -> str | None:
        """The folder for offloaded states, or None."""
        return Place.parse(self.offload).folder or None

    def sizes(self, ranks: int) -> dict[str, int]:
        """Return a dict that maps each axis to its size in a job with `ranks` ranks.

        Raises:
            PlanError: if the product of the sizes is not the number of ranks, or `data_shard` does not divide the data
                axis.
        """
        inner = {axis: getattr(self, axis) for axis in ("pipeline", *MODEL_AXES)}
        each = math.prod(inner.values())
        data = self.data if self.data is not None else max(1, ranks // each)
        if data * each != ranks:
            named = {"data": data if self.data is not None else 1} | inner
            product = " x ".join(f"{axis}={size}" for axis, size in named.items() if size > 1) or "data=1"
            multiple = "" if self.data is not None else "a multiple of "
            near = f"data={ranks // each}" if ranks >= each else self._on_data_axis(ranks)
            if ranks > each and ranks % each:
                near += f" with {ranks // each * each} ranks"
            raise PlanError(
                f"{product}: expected {multiple}{math.prod(named.values())} ranks, got {ranks}; nearest plan: {near}"
            )
        self._check_data_shard(data)
        return {"data": data} | inner

    def _on_data_axis(self, ranks: int) -> str:
        """Return the options that put all `ranks` ranks on the data axis, for an error message."""
        near = dict.fromkeys(("pipeline", *MODEL_AXES), 1) | ({} if self.data is None else {"data": ranks})
        near |= {
            name: default for name in _OF_AXES if getattr(self, name) != (default := getattr(Plan, name))
        }
        return ", ".join(f"{name}={value!r}" for name, value in near.items())

    def _check_data_shard(self, data: int) -> None:
        """Raise `PlanError` if `data_shard` is a number that does not divide `data`."""
        if isinstance(self.data_shard, int) and data % self.data_shard:
            near = max(n for n in range(1, min(data, self.data_shard) + 1) if data % n == 0)
            raise PlanError(
                f"data_shard={self.data_shard} does not divide data={data}; nearest plan: data_shard={near}"
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PlanError(f"{name}={value!r}: expected one of {', '.join(allowed)}")
