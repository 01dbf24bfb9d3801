"""Measure the ranks' arithmetic speed and memory."""

from __future__ import annotations

import resource
import sys
import time

import torch

from farandole.comm.communicator import Communicator
from farandole.parallel.precision import TYPES
from farandole.plan import Precision

_MEASURE_S = 0.2
_SIZE = {"cpu": 1024, "cuda": 8192}
"""The size of the matrices in the timed product."""


def measured_flops(precision: Precision, device: torch.device, comm: Communicator) -> float:
    """Measure the floating-point operations per second in matrix products on all ranks at once.  Collective call."""
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
    """Return this rank's peak accelerator memory, or its peak resident set size on a CPU, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
