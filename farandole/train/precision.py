"""The type that products are computed in: fp32, bf16, or fp16 with loss scaling.

Weights, gradients and optimizer are fp32 throughout; `torch.autocast` gives matrix products their operands
in the lower type (Micikevicius et al., 2018, "Mixed Precision Training").  Which type is faster differs
between machines by more than any list of processors would tell, so `auto` measures.  Scaling of the loss is the
business of `parallel.scaled`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from farandole.comm.communicator import Communicator
from farandole.models.gpt import GPTConfig

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

WORTH_IT = 1.2
"""bf16 has to be this many times as fast as fp32 to be chosen: it has 8 bits of precision, fp32 has 24."""


@dataclass(frozen=True)
class Choice:
    """The precision of a run, and the reason in words."""

    name: str
    reason: str


def choose_precision(
    asked: str, model: GPTConfig, tokens: int, comm: Communicator, device: torch.device
) -> Choice:
    """What was asked, or for `auto` what is faster on the slowest rank; all ranks get the same answer.

    `tokens` is how many a rank computes at a time: the rows of every product of the model.
    """
    if asked != "auto":
        return Choice(asked, "as asked")
    speeds = torch.tensor([_speed(dtype, model, tokens, device) for dtype in (torch.float32, torch.bfloat16)])
    comm.all_reduce(speeds, "min")
    fp32, bf16 = speeds.tolist()
    name = "bf16" if bf16 >= WORTH_IT * fp32 else "fp32"
    return Choice(name, f"measured: bf16 {bf16:.3g}, fp32 {fp32:.3g} GFLOP/s per rank")


def _speed(dtype: torch.dtype, model: GPTConfig, tokens: int, device: torch.device) -> float:
    """GFLOP/s on `device` of a block's largest product, forward and both of its gradients, median of five."""
    x = torch.randn(tokens, model.width, device=device).to(dtype)
    weight = torch.randn(4 * model.width, model.width, device=device).to(dtype)
    seconds = []
    for _ in range(6):  # the first one warms up
        started = time.perf_counter()
        y = x @ weight.T
        _ = y @ weight
        _ = y.T @ x
        if device.type == "cuda":  # products are only queued there
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    flops = 3 * 2 * x.numel() * weight.shape[0]
    return flops / statistics.median(seconds[1:]) / 1e9


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context in which to compute the model and its loss."""
    return torch.autocast(device.type, TYPES[precision], enabled=precision != "fp32")
