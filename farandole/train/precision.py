"""Choose the precision for `plan.precision = "auto"`.

The choice depends on hardware features instead of measurements, so that a busy machine does not change the precision
and the losses.
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
"""CPU flags that indicate bf16 multiplication: on Intel, on AMD since Zen 4, and on Arm."""
_CUDA_CAPABILITY = (8, 0)
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class PrecisionChoice:
    """A run's precision, and the reason for the choice as text."""

    name: Precision
    reason: str


def choose_precision(
    configured: Literal["auto", Precision], comm: Communicator, device: torch.device
) -> PrecisionChoice:
    """Return `configured`, or for "auto" bf16 if all ranks' devices support it, else fp32.  Collective call."""
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
