"""Whether a model fits into memory, said before a rank starts.

What is counted is what a run has from its first step to its last, in fp32 whatever the precision: it is known
to the byte.  Activations come on top.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from farandole.data.wording import counted, short, size
from farandole.models.gpt import GPTConfig
from farandole.train.config import ConfigError, TrainConfig

_STAGES = (0, 1, 2, 3)

_FOR_ACTIVATIONS = 0.2
"""The share of memory that a suggested size leaves to them."""


def trained_bytes(zero: int, ranks: int, *, common: bool) -> float:
    """For each parameter what `ranks` ranks need together: itself, its gradient and AdamW's two averages.

    `common`: whether they share memory, and with it one copy of what they divide.
    """
    weights = 4.0 * (1 if zero == 3 or (zero and common) else ranks)
    gradients = 4.0 * (1 if zero >= 2 else ranks)
    averages = 8.0 * (1 if zero >= 1 else ranks)
    return weights + gradients + averages


def copied_bytes(zero: int, ranks: int) -> float:
    """For each parameter the copies, in the memory of the host, of which a checkpoint is written."""
    return 12.0 * ranks if zero == 0 else 12.0 + 4.0  # rank 0 copies the whole weights too


def check_memory(config: TrainConfig, ranks: int) -> None:
    """Raise `ConfigError` where the `ranks` of this host cannot hold their models."""
    if torch.cuda.is_available():
        on_one = -(-ranks // torch.cuda.device_count())
        have = torch.cuda.get_device_properties(0).total_memory
        share = {stage: trained_bytes(stage, ranks, common=False) * on_one / ranks for stage in _STAGES}
        _check(config, share, on_one, have, "each accelerator has", "weights, gradients and AdamW's averages")
        each = {stage: copied_bytes(stage, ranks) for stage in _STAGES}
        parts = "copies for checkpoints"
    else:
        each = {
            stage: trained_bytes(stage, ranks, common=True) + copied_bytes(stage, ranks) for stage in _STAGES
        }
        parts = "weights, gradients and AdamW's averages, and copies of them for checkpoints"
    _check(config, each, ranks, available_bytes(), "this host has", parts)


def available_bytes() -> int:
    """The memory of this host that is not in use, as far as a control group lets this process have it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _group_limit()
    return free if limit is None else min(free, limit)


def _group_limit(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control group leaves (docker run --memory, Kubernetes limits); None where it sets no limit."""
    try:
        limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
        numbers = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(numbers["active_file"]) + int(numbers["inactive_file"])  # given up when asked for
        return max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError, KeyError):  # no such group, or "max"
        return None


def _check(
    config: TrainConfig, each: dict[int, float], ranks: int, have: int, whose: str, parts: str
) -> None:
    """`each`: the bytes per parameter that `ranks` ranks need with each stage of ZeRO."""
    model, zero = config.model.gpt(), config.parallel.zero
    need = each[zero] * model.parameters
    if need <= have:
        return
    room = (1 - _FOR_ACTIVATIONS) * have
    fitting = [stage for stage in (1, 2, 3) if stage > zero and each[stage] * model.parameters <= room]
    divided = (
        f"parallel.zero={fitting[0]} fits; " if fitting and config.parallel.compression == "none" else ""
    )
    raise ConfigError(
        f"model.width={model.width} with model.layers={model.layers} makes {short(model.parameters)} parameters, "
        f"which need {size(need)} on {counted(ranks, 'rank')} ({parts}: {each[zero]:.3g} bytes per parameter), "
        f"and {whose} {size(have)}; {divided}{_advice(model, each[zero], have)}"
    )


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
