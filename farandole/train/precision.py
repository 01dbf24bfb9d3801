"""The type that products are computed in: fp32, bf16, or fp16 with loss scaling.

Weights, gradients and optimizer are fp32 throughout; `torch.autocast` gives matrix products their operands
in the lower type (Micikevicius et al., 2018, "Mixed Precision Training").  `auto` is decided by what the hardware says that it can
multiply, not by a measurement: on a loaded machine the same command would choose another type, and learn other weights.
Scaling of the loss is the business of `parallel.loss_scaling`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from farandole.comm.communicator import Communicator

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Of processors that multiply bf16: Intel's, AMD's from Zen 4 on, and Arm's."""
_CUDA_CAPABILITY = (8, 0)
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Choice:
    """The precision of a run, and the reason in words."""

    name: str
    reason: str


def choose_precision(asked: str, comm: Communicator, device: torch.device) -> Choice:
    """What was asked, or for `auto` bf16 if the devices of all ranks multiply it; all ranks get the same answer."""
    if asked != "auto":
        return Choice(asked, "as asked")
    found = comm.all_gather_object(bf16_unit(device))
    missing = next((rank for rank, unit in enumerate(found) if not unit), None)
    if missing is None:
        return Choice("bf16", f"the hardware multiplies bf16: {', '.join(sorted(set(found)))}")
    return Choice("fp32", f"the {device.type.upper()} of rank {missing} does not multiply bf16")


def bf16_unit(device: torch.device) -> str:
    """The name of what multiplies bf16 on a device, or ""."""
    if device.type == "cuda":
        capable = torch.cuda.get_device_capability(device) >= _CUDA_CAPABILITY
        return torch.cuda.get_device_name(device) if capable else ""
    flags = _cpu_flags()
    return next((flag for flag in _CPU_FLAGS if flag in flags), "")


def _cpu_flags() -> set[str]:
    try:
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:  # no Linux
        return set()
    return set(lines[0].split()) if lines else set()


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context in which to compute the model and its loss."""
    return torch.autocast(device.type, TYPES[precision], enabled=precision != "fp32")
