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

TRAINED_BYTES = 16
"""For each parameter: itself, its gradient and AdamW's two averages."""

COPIED_BYTES = 12
"""For each parameter: the copy, in the memory of the host, of which a checkpoint is written."""

_FOR_ACTIVATIONS = 0.2
"""The share of memory that a suggested size leaves to them."""


def check_memory(config: TrainConfig, ranks: int) -> None:
    """Raise `ConfigError` where the `ranks` of this host cannot hold their models."""
    model = config.model.gpt()
    if torch.cuda.is_available():
        devices = torch.cuda.device_count()
        have = torch.cuda.get_device_properties(0).total_memory
        _check(model, TRAINED_BYTES, -(-ranks // devices), have, "each accelerator has")
        each = COPIED_BYTES
    else:
        each = TRAINED_BYTES + COPIED_BYTES
    _check(model, each, ranks, available_bytes(), "this host has")


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


def _check(model: GPTConfig, each: int, ranks: int, have: int, whose: str) -> None:
    need = each * model.parameters * ranks
    if need <= have:
        return
    parts = "weights, gradients and AdamW's averages" if each >= TRAINED_BYTES else "copies for checkpoints"
    if each > TRAINED_BYTES:
        parts += ", and copies of them for checkpoints"
    raise ConfigError(
        f"model.width={model.width} with model.layers={model.layers} makes {short(model.parameters)} parameters, "
        f"which need {size(need)} on {counted(ranks, 'rank')} ({parts}: {each} bytes per parameter and rank), "
        f"and {whose} {size(have)}; {_advice(model, each * ranks, have)}"
    )


def _advice(model: GPTConfig, each: int, have: int) -> str:
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
