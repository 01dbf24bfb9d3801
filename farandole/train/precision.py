"""The choice of `plan.precision = "auto"`.

It depends on features of the hardware, not on a measurement: on a loaded machine the same command would choose another precision,
and give other losses.
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
"""Of processors that multiply bf16: Intel's, AMD's from Zen 4 on, and Arm's."""
_CUDA_CAPABILITY = (8, 0)
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Choice:
    """The precision of a run, and the reason in words."""

    name: Precision
    reason: str


def choose_precision(asked: Literal["auto", Precision], comm: Communicator, device: torch.device) -> Choice:
    """Return `asked`, or for "auto" bf16 if the devices of all ranks multiply it; the same on all ranks."""
    if asked != "auto":
        return Choice(asked, "as asked")
    found = comm.all_gather_object(bf16_unit(device))
    missing = next((rank for rank, unit in enumerate(found) if not unit), None)
    if missing is None:
        return Choice("bf16", f"the hardware multiplies bf16: {', '.join(sorted(set(found)))}")
    return Choice("fp32", f"the {device.type.upper()} of rank {missing} does not multiply bf16")


def bf16_unit(device: torch.device) -> str:
    """Return the name of the unit that multiplies bf16 on a device, or ""."""
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
