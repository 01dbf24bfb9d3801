"""Compute a model's operations per token, and measure the ranks' arithmetic speed and memory."""

from __future__ import annotations

import resource
import sys
import time

import torch
from torch import nn

from farandole.comm.communicator import Communicator
from farandole.models.deepseek import LatentAttention
from farandole.models.layers import Head, SelfAttention
from farandole.models.moe import Experts, MixtureOfExperts
from farandole.models.sequence import Transformer
from farandole.parallel.precision import TYPES
from farandole.plan import Precision

_MEASURE_S = 0.2
_SIZE = {"cpu": 1024, "cuda": 8192}
"""The size of the matrices in the timed product."""


def flops_per_token(model: nn.Module, context: int) -> int:
    """Return a transformer's floating-point operations per token, forward and backward; 0 for other models.

    A weight in a matrix product counts 6 operations, or 4 if the weight is frozen.  Attention over a context of C
    positions adds 12 L D C (Chowdhery et al., 2022, "PaLM", appendix B).  In a mixture of experts, only the selected
    experts count.  Recomputation is not counted.
    """
    if not isinstance(model, Transformer):
        return 0
    total = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear | Head):
            total += _per_weight(module.weight) * module.weight.numel()
        if isinstance(module, MixtureOfExperts) and isinstance(module.experts, Experts):
            weights = (module.experts.gate_up, module.experts.down)
            share = int(module.router.top) / len(module.experts.gate_up)
            total += sum(_per_weight(weight) * weight.numel() for weight in weights) * share
        if isinstance(module, SelfAttention | LatentAttention):
            total += 12 * module.out.in_features * context
    return int(total)


def _per_weight(weight: torch.Tensor) -> int:
    return 6 if weight.requires_grad else 4


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
