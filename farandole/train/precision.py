"""The precision of `plan.precision = "auto"`.

The choice depends on hardware features, not on a measurement: otherwise the same command could choose another precision
on a loaded machine, and give other losses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from farandole.comm.communicator import Communicator
from farandole.plan import Precision

_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags of processors that multiply bf16: Intel's, AMD's from Zen 4 on, and Arm's."""
_CUDA_CAPABILITY = (8, 0)
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision of a run, and the reason as text."""

    name: Precision
    reason: str


def choose_precision(
    configured: Literal["auto", Precision], comm: Communicator, device: torch.device
) -> PrecisionChoice:
    """Return `configured`; for "auto" bf16 if the devices of all ranks multiply bf16, else fp32.  A collective call."""
    if configured != "auto":
        return PrecisionChoice(configured, "configured")
    found = comm.all_gather_object(bf16_unit(device))
    missing = next((rank for rank, unit in enumerate(found) if not unit), None)
    if missing is None:
        return PrecisionChoice("bf16", f"the hardware multiplies bf16: {', '.join(sorted(set(found)))}")
    return PrecisionChoice("fp32", f"the {device.type.upper()} of rank {missing} does not multiply bf16")


def bf16_unit(device: torch.device) -> str:
    """Return the name of the device's bf16 multiplication unit, or ""."""
    if device.type == "cuda":
        capable = torch.cuda.get_device_capability(device) >= _CUDA_CAPABILITY
        return torch.cuda.get_device_name(device) if capable else ""
    flags = _cpu_flags()
    return next((flag for flag in _CPU_FLAGS if flag in flags), "")


def _cpu_flags() -> set[str]:
    try:
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:  # not Linux
        return set()
    return set(lines[0].split()) if lines else set()
