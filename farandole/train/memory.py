"""The memory of a run: a `Workload` for the planner, and a check before a rank starts that it fits.

The check first counts the bytes that a run has from its first step to its last, in fp32 whatever the precision.  On a CPU host it then
estimates the activations of a step (`planner`), unless an upper bound fits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from farandole.data.wording import counted, short, size
from farandole.launch.control_groups import available_memory
from farandole.memory.disk import Bandwidth
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.models.loss import PIECE_BYTES, next_token_loss
from farandole.plan import Plan
from farandole.planner import Estimate, Machine, Workload, bytes_per_parameter, estimate_workload
from farandole.train.config import ConfigError, TrainConfig

_STAGES = (0, 1, 2, 3)

_PIECES = 32
"""The number of parts in which the loss of a micro-batch is traced: fewer than it has, which takes less time."""

_FOR_ACTIVATIONS = 0.2
"""The share of memory that a suggested size leaves to activations."""

_SURE = 0.9
"""A step is refused if this share of its predicted memory does not fit: predictions are within 10 %."""


def workload_of(config: TrainConfig, ranks: int) -> Workload:
    """Return a rank's part of a step of `config`.  Raises `ConfigError` for tasks that cannot be estimated."""
    if config.task != "text":
        raise ConfigError(f"task={config.task!r}: only steps of task='text' are estimated")
    count, samples = config.micro_batches(ranks)
    with torch.device("meta"):
        model = build_gpt(config.model.gpt())
        tokens = torch.empty(samples, config.model.context, dtype=torch.int64)

    def loss(logits: Tensor) -> Tensor:
        targets = torch.zeros(tokens.shape, dtype=torch.int64, device=logits.device)
        return next_token_loss(logits, targets, max(PIECE_BYTES, 4 * logits.numel() // _PIECES))

    return Workload(model=model, example=tokens, loss=loss, micro_batches=count, checkpoints=True)


def check_memory(config: TrainConfig, ranks: int) -> None:
    """Raise `ConfigError` if the `ranks` of this host have too little memory for a GPT; other models are not checked."""
    if config.task != "text":
        return
    offload = config.plan.offload
    copies = {stage: _copied(stage, offload, ranks) for stage in _STAGES}
    if torch.cuda.is_available():
        on_one = -(-ranks // torch.cuda.device_count())
        have = torch.cuda.get_device_properties(0).total_memory
        share = {stage: _trained(stage, offload, ranks) * on_one / ranks for stage in _STAGES}
        _check(config, share, on_one, have, "each accelerator has", "weights, gradients and AdamW's averages")
        each = copies
        parts = "copies for checkpoints"
    else:
        each = {stage: _trained(stage, offload, ranks) + copies[stage] for stage in _STAGES}
        parts = "weights, gradients and AdamW's averages, and copies of them for checkpoints"
    have = available_memory()
    _check(config, each, ranks, have, "this host has", parts)
    if not torch.cuda.is_available() and config.plan.swap == "none":
        check_step(config, ranks, have)


def _trained(zero: int, offload: str, ranks: int) -> float:
    """Return the bytes of weights, gradients and states on all devices, for each parameter."""
    accelerated = torch.cuda.is_available()
    machine = Machine(memory=1, shared=not accelerated, host=not accelerated)
    return bytes_per_parameter(Plan(zero=zero, offload=offload), ranks, machine)


def _copied(zero: int, offload: str, ranks: int) -> float:
    """Return the bytes of copies for checkpoints in the memory of the host, for each parameter."""
    return bytes_per_parameter(Plan(zero=zero, offload=offload), ranks, Machine(memory=1), checkpoints=True)


def check_step(config: TrainConfig, ranks: int, have: int) -> None:
    """Raise `ConfigError` if steps of `ranks` ranks on a CPU host need more than `have` bytes."""
    if config.batch % ranks or ranks * _at_most(config, ranks) <= have:  # the former is refused elsewhere
        return
    found = _estimated(config, ranks)
    if _SURE * ranks * found.peak <= have:
        return
    count, samples = config.micro_batches(ranks)
    share = count * samples
    smaller = [n for n in range(samples - 1, 0, -1) if share % n == 0]
    near = next((n for n in smaller if ranks * _estimated(config, ranks, n).peak <= have), None)
    advice = "fewer ranks or a smaller model.context need less"
    if near is not None:
        advice = f"nearest that fits: micro_batch={near}"
    raise ConfigError(
        f"a step in which a rank computes {counted(samples, 'sample')} at a time needs {size(ranks * found.peak)} on "
        f"{counted(ranks, 'rank')} ({size(ranks * found.parts['activations'])} of activations), and this host has "
        f"{size(have)}; {advice}, and farandole plan shows what else would do"
    )


def _estimated(config: TrainConfig, ranks: int, micro_batch: int | None = None) -> Estimate:
    """Estimate the memory of a rank, with fp32 weights where the precision is not known yet."""
    if micro_batch is not None:
        config = config.model_copy(update={"micro_batch": micro_batch})
    plan = config.plan.plan("fp32" if config.plan.precision == "auto" else config.plan.precision)
    machine = Machine(memory=available_memory(), disk=Bandwidth(1e9, 1e9, "any"))  # its speed is not used
    return estimate_workload(workload_of(config, ranks), plan, ranks, machine)


def _at_most(config: TrainConfig, ranks: int) -> float:
    """Return an upper bound of the bytes of a rank."""
    _, samples = config.micro_batches(ranks)
    model = config.model
    tokens = samples * model.context
    kept = 4.0 * tokens * model.layers * (17 * model.width + 3 * model.heads * model.context)
    logits = 4.0 * tokens * model.vocabulary
    whole = _trained(0, "none", 1) + _copied(0, "none", 1)
    return (1 << 30) + 2 * (kept + 3 * logits) + 1.5 * whole * model.gpt().parameters


def _check(
    config: TrainConfig, each: dict[int, float], ranks: int, have: int, whose: str, parts: str
) -> None:
    """`each`: the bytes per parameter that `ranks` ranks need with each stage of ZeRO."""
    model, zero = config.model.gpt(), config.plan.zero
    need = each[zero] * model.parameters
    if need <= have:
        return
    usable = (1 - _FOR_ACTIVATIONS) * have
    fitting = [stage for stage in (1, 2, 3) if stage > zero and each[stage] * model.parameters <= usable]
    divided = _divided(config, ranks, fitting, usable)
    raise ConfigError(
        f"model.width={model.width} with model.layers={model.layers} makes {short(model.parameters)} parameters, "
        f"which need {size(need)} on {counted(ranks, 'rank')} ({parts}: {each[zero]:.3g} bytes per parameter), "
        f"and {whose} {size(have)}; {divided}{_advice(model, each[zero], have)}"
    )


def _divided(config: TrainConfig, ranks: int, fitting: list[int], usable: float) -> str:
    """Name a plan that fits: one that divides more, or keeps AdamW's moments on a disk."""
    if config.plan.compression != "none":
        return ""
    if fitting:
        return f"plan.zero={fitting[0]} fits; "
    least = _trained(3, "disk:FOLDER", ranks) + _copied(3, "disk:FOLDER", ranks)
    if config.plan.offload == "none" and least * config.model.gpt().parameters <= usable:
        return "plan.zero=3 plan.offload=disk:FOLDER fits; "
    return ""


def _advice(model: GPTConfig, each: float, have: int) -> str:
    """Name the widest model of these layers and heads that fits in `have` bytes, at `each` per parameter."""
    allowed = (1 - _FOR_ACTIVATIONS) * have / each
    unit = 2 * model.heads
    narrow, wide = 0, model.width // unit  # the first fits, the second does not
    while wide - narrow > 1:
        middle = (narrow + wide) // 2
        fits = replace(model, width=middle * unit).parameters <= allowed
        narrow, wide = (middle, wide) if fits else (narrow, middle)
    if narrow == 0:
        return "fewer ranks, model.layers or model.vocabulary need less"
    return f"nearest that fits: model.width={narrow * unit}"
