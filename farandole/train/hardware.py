"""Choose the precision for `plan.precision = "auto"`, and measure the ranks' arithmetic speed and memory.

The choice depends on hardware features instead of measurements, so that the load on the machine does not affect the
precision or the losses.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch

from farandole.comm.communicator import Communicator
from farandole.parallel.matrix_products import use_fast_products
from farandole.parallel.precision import TYPES
from farandole.parallel.processor import read_processor
from farandole.plan import Precision

_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""CPU flags that indicate fast bf16 multiplication: on Intel, on AMD since Zen 4, and on Arm.

An Intel processor, or a virtual machine on one, may have avx512_bf16 without amx_bf16.  Such a processor multiplies
bf16 at about half the speed of fp32 (88 and 163 GFLOP/s per core, measured in November 2026).
"""
_CUDA_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision of a run, and the reason for this choice."""

    name: Precision
    reason: str


def choose_precision(
    configured: Literal["auto", Precision], comm: Communicator, device: torch.device
) -> PrecisionChoice:
    """Return the precision of the run, and the reason for the choice.  Collective call.

    If `configured` is "auto", select bf16 if the devices of all ranks multiply bf16 faster than fp32, and fp32
    otherwise.
    """
    if configured != "auto":
        return PrecisionChoice(configured, "configured")
    found = comm.all_gather_object(bf16_unit(device))
    missing = next((rank for rank, unit in enumerate(found) if not unit), None)
    if missing is None:
        return PrecisionChoice("bf16", f"the hardware multiplies bf16: {', '.join(sorted(set(found)))}")
    return PrecisionChoice(
        "fp32", f"the {device.type.upper()} of rank {missing} does not multiply bf16 faster than fp32"
    )


def bf16_unit(device: torch.device) -> str:
    """Return the name of the hardware unit that multiplies bf16 faster than fp32, or "" if there is no such unit."""
    if device.type == "cuda":
        capable = torch.cuda.get_device_capability(device) >= _CUDA_CAPABILITY
        return torch.cuda.get_device_name(device) if capable else ""
    processor = read_processor()
    units = [flag for flag in _CPU_FLAGS if flag in processor.flags]
    if processor.vendor == "GenuineIntel" and units == ["avx512_bf16"]:
        return ""
    return units[0] if units else ""


_MEASURE_S = 0.2
_SIZE = {"cpu": 1024, "cuda": 8192}
"""The number of rows and columns of the matrices in the timed product, by device type."""


def measured_flops(precision: Precision, device: torch.device, comm: Communicator) -> float:
    """Return the measured matrix-product speed of all ranks together, in FLOP/s.  Collective call."""
    use_fast_products()
    size = _SIZE.get(device.type, 2048)
    dtype = TYPES[precision]
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    torch.mm(a, b)
    comm.barrier()
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < _MEASURE_S:
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count += 1
    speed = torch.tensor(2.0 * size**3 * count / elapsed, dtype=torch.float64)
    comm.all_reduce(speed)
    return float(speed)


def peak_memory(device: torch.device) -> int:
    """Return this rank's peak memory in bytes: accelerator memory, or the resident set size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
