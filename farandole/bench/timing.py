"""Measure the time of calls on all ranks."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator

import torch

import farandole
from farandole.launch.runtime import Runtime


@contextlib.contextmanager
def measuring_rank() -> Iterator[Runtime]:
    """Initialize a rank for measurements, and yield its runtime.

    The rank logs no stall warnings, because ranks may wait for a long time on a busy machine.
    """
    logging.getLogger("farandole").setLevel(logging.ERROR)
    with farandole.init() as runtime:
        yield runtime


def median_seconds(call: Callable[[], object], runtime: Runtime, turns: int, limit_s: float) -> float:
    """Return the median time in seconds of `turns` calls of `call`.  This is a collective call.

    Each call starts on all ranks at the same time.  An additional first call is not counted.  After `limit_s`
    seconds, no more calls are started.  If only the first call ran, its time is returned.
    """
    found: list[float] = []
    start = time.perf_counter()
    while len(found) <= turns and (not found or slowest(time.perf_counter() - start, runtime) < limit_s):
        runtime.comm.barrier()
        began = time.perf_counter()
        call()
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:] or found)


def slowest(seconds: float, runtime: Runtime) -> float:
    """Return the maximum of `seconds` over all ranks.  This is a collective call."""
    largest = torch.tensor([seconds], dtype=torch.float64)
    runtime.comm.all_reduce(largest, "max")
    return largest.item()
