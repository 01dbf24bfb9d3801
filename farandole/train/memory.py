"""Estimate the memory that a run needs, and check before the ranks start that this memory is available.

The check first adds up the memory for weights, gradients, optimizer states and checkpoint copies, assuming fp32.  On a
CPU host, the check then uses the planner to estimate the memory of a step, including activations.  This estimate is
skipped if a simple upper bound on the step's memory does not exceed the available memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from farandole._troubleshooting import see
from farandole.data.wording import counted, short, size
from farandole.launch.control_groups import available_memory
from farandole.memory.disk import Bandwidth
from farandole.models.gpt import GPTConfig
from farandole.parallel.pipeline.apply import schedule_of
from farandole.plan import MODEL_AXES, Plan, PlanError
from farandole.planner import Estimate, Machine, bytes_per_parameter, estimate_workload
from farandole.planner.pipeline import StagedModel
from farandole.train.config import ConfigError, TrainConfig, plan_config_error
from farandole.train.hardware import bf16_unit
from farandole.train.start import Start, task_config
from farandole.train.workload import PLANNED, workload_of

_STAGES = (0, 1, 2, 3)

_FOR_ACTIVATIONS = 0.2
"""The fraction of memory that is left for activations when a smaller model or another plan is suggested."""

_REFUSED_FRACTION = 0.9
"""A step is rejected if this fraction of its predicted memory does not fit.  Predictions are accurate to 10 %."""


def check_memory(config: TrainConfig, ranks: int) -> None:
    """Raise `ConfigError` if the plan does not support the model, or if a language model does not fit in memory."""
    if any(getattr(config.plan, axis) > 1 for axis in ("pipeline", *MODEL_AXES)):
        _check_division(config, ranks)
    if config.task not in ("text", "sft"):
        return
    plan, accelerated = config.plan, torch.cuda.is_available()
    split = plan.ranks_per_sample * plan.expert > 1
    # with adapters or split layers, a rank has states for only some parameters; only the estimate considers this
    if plan.lora_rank or config.model.folder or (split and not accelerated):
        if not accelerated and plan.swap == "none":
            check_step(config, ranks, available_memory())
        return
    offload, copies_of_model = config.plan.offload, ranks // config.plan.tensor
    copies = {stage: _copied(stage, offload, copies_of_model) for stage in _STAGES}
    if torch.cuda.is_available():
        on_one = -(-ranks // torch.cuda.device_count())
        have = torch.cuda.get_device_properties(0).total_memory
        share = {stage: _trained(stage, offload, copies_of_model) * on_one / ranks for stage in _STAGES}
        _check_state(
            config,
            share,
            on_one,
            have,
            "the memory of each accelerator is",
            "weights, gradients and AdamW's moments",
        )
        each = copies
        parts = "copies for checkpoints"
    else:
        each = {stage: _trained(stage, offload, copies_of_model) + copies[stage] for stage in _STAGES}
        parts = "weights, gradients and AdamW's moments, and copies of them for checkpoints"
    have = available_memory()
    _check_state(config, each, ranks, have, "this host's free memory is", parts)
    if not torch.cuda.is_available() and config.plan.swap == "none":
        check_step(config, ranks, have)


def _check_division(config: TrainConfig, ranks: int) -> None:
    """Raise `ConfigError` if the plan cannot split the model, or the schedule does not support the micro-batches."""
    plan, (micro_batches, _) = _plan_of(config), config.micro_batches(ranks)
    try:
        if plan.pipeline > 1:
            schedule_of(plan, micro_batches)
        if config.task not in PLANNED:  # `parallelize` checks the models of custom tasks
            return
        workload = workload_of(config, ranks).split(plan, ranks)
        if plan.pipeline > 1:
            StagedModel(workload, plan)
    except PlanError as error:
        raise plan_config_error(error) from None


def summary(start: Start) -> dict[str, str]:
    """Return the lines that `farandole train --dry-run` prints, keyed by label."""
    config, ranks = task_config(start.config, start.checkpoint), start.ranks
    count, samples = config.micro_batches(ranks)
    micro_batches = "1 micro-batch" if count == 1 else f"{count:,} micro-batches"
    section = config.plan
    plan = {name: getattr(section, name) for name in ("zero", "precision", "recompute", "offload")}
    plan |= section.model_dump(exclude_defaults=True)
    if section.precision == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        plan["precision"] = f"auto ({'bf16' if bf16_unit(device) else 'fp32'} on this host)"
    together = config.plan.ranks_per_sample
    groups = counted(ranks // together, "rank" if together == 1 else "group")
    of = "" if together == 1 else f" of {together} ranks"
    lines = {
        "task": config.task,
        "ranks": f"{ranks} on this host",
        "steps": f"{config.steps:,}",
        "batch": f"{counted(config.batch, 'sample')} = {groups}{of} x {micro_batches} x {samples:,}",
        "plan": ", ".join(f"{key}={value}" for key, value in plan.items()),
    }
    if config.task in PLANNED:
        if config.task not in ("images", "classify"):  # only the data specifies the number of classes
            model = workload_of(config, ranks).model
            lines["parameters"] = short(sum(parameter.numel() for parameter in model.parameters()))
        if not torch.cuda.is_available():
            found = _estimated(config, ranks)
            lines["memory"] = (
                f"{size(found.mean_peak)} per rank and {size(ranks * found.mean_peak)} in total predicted on "
                f"{counted(ranks, 'rank')}; {size(available_memory())} available on this host"
            )
            if found.pipeline is not None:
                lines["pipeline"] = (
                    f"ranks are idle for {100 * found.pipeline.idle:.0f} % of a step (predicted)"
                )
    if start.checkpoint is None:
        lines["run folder"] = str(Path(config.out) / f"{config.name}-DATE-TIME")
    else:
        lines["checkpoint"] = str(start.checkpoint)
    return lines | {
        "dry run": "the configuration, the data and the folder of runs are valid; nothing was trained or saved"
    }


def _trained(zero: int, offload: str, ranks: int) -> float:
    """Return the bytes per parameter for weights, gradients and optimizer states, summed over all devices."""
    accelerated = torch.cuda.is_available()
    machine = Machine(memory=1, shared=not accelerated, host=not accelerated)
    return bytes_per_parameter(Plan(zero=zero, offload=offload), ranks, machine)


def _copied(zero: int, offload: str, ranks: int) -> float:
    """Return the bytes per parameter for checkpoint copies in host memory, summed over all ranks."""
    return bytes_per_parameter(Plan(zero=zero, offload=offload), ranks, Machine(memory=1), checkpoints=True)


def check_step(config: TrainConfig, ranks: int, have: int) -> None:
    """Raise `ConfigError` if a step on `ranks` CPU ranks needs more than `have` bytes."""
    if config.batch * config.plan.ranks_per_sample % ranks:  # rejected elsewhere
        return
    if not config.model.folder and ranks * _upper_bound(config, ranks) <= have:
        return
    found = _estimated(config, ranks)
    if _REFUSED_FRACTION * ranks * found.mean_peak <= have:
        return
    count, samples = config.micro_batches(ranks)
    share = count * samples
    smaller = [n for n in range(samples - 1, 0, -1) if share % n == 0]
    near = next((n for n in smaller if ranks * _estimated(config, ranks, n).mean_peak <= have), None)
    advice = "use fewer ranks or a smaller model.context"
    if near is not None:
        advice = f"try micro_batch={near}"
        if config.plan.micro_batches:
            advice = f"try plan.micro_batches={share // near}"
    raise ConfigError(
        f"a step with micro-batches of {counted(samples, 'sample')} needs {size(ranks * found.mean_peak)} on "
        f"{counted(ranks, 'rank')} (up to {size(found.parts['activations'])} of activations per rank), but this host's "
        f"free memory is {size(have)}; {advice}, or run farandole plan for other plans that fit{see('does-not-fit')}"
    )


def _estimated(config: TrainConfig, ranks: int, micro_batch: int | None = None) -> Estimate:
    """Estimate the memory that a rank needs, with fp32 in place of precision "auto"."""
    if micro_batch is not None:
        section = config.plan.model_copy(update={"micro_batches": 0})
        config = config.model_copy(update={"micro_batch": micro_batch, "plan": section})
    plan = _plan_of(config)
    machine = Machine(
        memory=available_memory(), disk=Bandwidth(1e9, 1e9, "any")
    )  # the disk speed is not used
    try:
        return estimate_workload(workload_of(config, ranks), plan, ranks, machine)
    except PlanError as error:
        raise plan_config_error(error) from None


def _plan_of(config: TrainConfig) -> Plan:
    """Return the configured plan, with fp32 in place of precision "auto"."""
    return config.plan.plan("fp32" if config.plan.precision == "auto" else config.plan.precision)


def _upper_bound(config: TrainConfig, ranks: int) -> float:
    """Return an upper bound on the memory that a rank needs in a step, in bytes."""
    count, samples = config.micro_batches(ranks)
    model = config.model
    # with a pipeline, a rank may store the activations of all micro-batches
    tokens = samples * model.context * (count if config.plan.pipeline > 1 else 1)
    kept = 4.0 * tokens * model.layers * (17 * model.width + 3 * model.heads * model.context)
    logits = 4.0 * tokens * model.vocabulary
    whole = _trained(0, "none", 1) + _copied(0, "none", 1)
    return (1 << 30) + 2 * (kept + 3 * logits) + 1.5 * whole * model.gpt().parameters


def _check_state(
    config: TrainConfig, each: dict[int, float], ranks: int, have: int, whose: str, parts: str
) -> None:
    """Raise `ConfigError` if the model state exceeds `have` bytes.  `each` maps ZeRO stages to bytes per parameter."""
    model, zero = config.model.gpt(), config.plan.zero
    need = each[zero] * model.parameters
    if need <= have:
        return
    usable = (1 - _FOR_ACTIVATIONS) * have
    fitting = [stage for stage in (1, 2, 3) if stage > zero and each[stage] * model.parameters <= usable]
    divided = _divided(config, ranks, fitting, usable)
    raise ConfigError(
        f"a model with model.width={model.width} and model.layers={model.layers} has {short(model.parameters)} "
        f"parameters, which need {size(need)} on {counted(ranks, 'rank')} ({parts}: {each[zero]:,.0f} bytes per "
        f"parameter), but {whose} {size(have)}; {divided}{_advice(model, each[zero], have)}{see('does-not-fit')}"
    )


def _divided(config: TrainConfig, ranks: int, fitting: list[int], usable: float) -> str:
    """Return advice to use a higher ZeRO stage or to offload to disk, or "" if neither is sufficient."""
    if config.plan.compression != "none":
        return ""
    if fitting:
        return f"plan.zero={fitting[0]} fits; "
    copies_of_model = ranks // config.plan.tensor
    least = _trained(3, "disk:FOLDER", copies_of_model) + _copied(3, "disk:FOLDER", copies_of_model)
    if config.plan.offload == "none" and least * config.model.gpt().parameters <= usable:
        return "plan.zero=3 plan.offload=disk:FOLDER fits; "
    return ""


def _advice(model: GPTConfig, each: float, have: int) -> str:
    """Return advice to use the widest model that fits in `have` bytes, at `each` bytes per parameter."""
    allowed = (1 - _FOR_ACTIVATIONS) * have / each
    unit = 2 * model.heads
    narrow, wide = 0, model.width // unit  # narrow fits, wide does not
    while wide - narrow > 1:
        middle = (narrow + wide) // 2
        fits = replace(model, width=middle * unit).parameters <= allowed
        narrow, wide = (middle, wide) if fits else (narrow, middle)
    if narrow == 0:
        return "use fewer ranks, or reduce model.layers or model.vocabulary"
    return f"try model.width={narrow * unit}"
