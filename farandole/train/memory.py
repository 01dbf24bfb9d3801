"""What a run needs of memory: a `Workload` for the planner, and whether it fits, said before a rank starts.

What is counted first is what a run has from its first step to its last, in fp32 whatever the precision: it is known
to the byte.  On a CPU host the activations of a step are estimated then (`planner`), if it could be close.
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
"""In how many pieces the loss of a micro-batch is traced: fewer than it has, which takes less time."""

_FOR_ACTIVATIONS = 0.2
"""The share of memory that a suggested size leaves to them."""

_SURE = 0.9
"""A step is refused if this much of what was predicted for it does not fit: predictions are within 10 %."""


def workload_of(config: TrainConfig, ranks: int) -> Workload:
    """One rank's part of a step of `config` on `ranks` ranks.  Raises `ConfigError` where it cannot be estimated."""
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
    """Raise `ConfigError` where the `ranks` of this host cannot hold their GPTs; other models are not checked."""
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
    """Bytes of weights, gradients and states on all devices, for each parameter."""
    accelerated = torch.cuda.is_available()
    machine = Machine(memory=1, shared=not accelerated, host=not accelerated)
    return bytes_per_parameter(Plan(zero=zero, offload=offload), ranks, machine)


def _copied(zero: int, offload: str, ranks: int) -> float:
    """Bytes of copies for checkpoints in the memory of the host, for each parameter."""
    return bytes_per_parameter(Plan(zero=zero, offload=offload), ranks, Machine(memory=1), checkpoints=True)


def check_step(config: TrainConfig, ranks: int, have: int) -> None:
    """Raise `ConfigError` where steps of `ranks` ranks on a CPU host need more than the `have` bytes there are."""
    if config.batch % ranks or ranks * _at_most(config, ranks) <= have:  # the former is refused elsewhere
        return
    found = _estimated(config, ranks)
    if _SURE * ranks * found.peak <= have:
        return
    count, samples = config.micro_batches(ranks)
    share = count * samples
    smaller = [size for size in range(samples - 1, 0, -1) if share % size == 0]
    near = next((size for size in smaller if _fits(config, size, ranks, have)), None)
    advice = "fewer ranks or a smaller model.context need less"
    if near is not None:
        advice = f"nearest that fits: micro_batch={near}"
    raise ConfigError(
        f"a step in which a rank computes {counted(samples, 'sample')} at a time needs {size(ranks * found.peak)} on "
        f"{counted(ranks, 'rank')} ({size(ranks * found.parts['activations'])} of activations), and this host has "
        f"{size(have)}; {advice}, and farandole plan shows what else would do"
    )


def _fits(config: TrainConfig, micro_batch: int, ranks: int, have: int) -> bool:
    smaller = config.model_copy(update={"micro_batch": micro_batch})
    return ranks * _estimated(smaller, ranks).peak <= have


def _estimated(config: TrainConfig, ranks: int) -> Estimate:
    """What a rank needs, with fp32 weights where the precision is not known yet."""
    plan = config.plan.plan("fp32" if config.plan.precision == "auto" else config.plan.precision)
    machine = Machine(
        memory=available_memory(), disk=Bandwidth(1e9, 1e9, "any")
    )  # its speed is not looked at
    return estimate_workload(workload_of(config, ranks), plan, ranks, machine)


def _at_most(config: TrainConfig, ranks: int) -> float:
    """Bytes that a rank does not exceed, without a closer look."""
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
    room = (1 - _FOR_ACTIVATIONS) * have
    fitting = [stage for stage in (1, 2, 3) if stage > zero and each[stage] * model.parameters <= room]
    divided = _divided(config, ranks, fitting, room)
    raise ConfigError(
        f"model.width={model.width} with model.layers={model.layers} makes {short(model.parameters)} parameters, "
        f"which need {size(need)} on {counted(ranks, 'rank')} ({parts}: {each[zero]:.3g} bytes per parameter), "
        f"and {whose} {size(have)}; {divided}{_advice(model, each[zero], have)}"
    )


def _divided(config: TrainConfig, ranks: int, fitting: list[int], room: float) -> str:
    """What fits of plans that divide more, or keep AdamW's averages on a disk."""
    if config.plan.compression != "none":
        return ""
    if fitting:
        return f"plan.zero={fitting[0]} fits; "
    least = _trained(3, "disk:FOLDER", ranks) + _copied(3, "disk:FOLDER", ranks)
    if config.plan.offload == "none" and least * config.model.gpt().parameters <= room:
        return "plan.zero=3 plan.offload=disk:FOLDER fits; "
    return ""


def _advice(model: GPTConfig, each: float, have: int) -> str:
    """The widest model of these layers and heads for which `have` bytes suffice, at `each` per parameter."""
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
