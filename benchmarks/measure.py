"""Measure implementations in alternating turns and report the median over the turns of one run.

Machines are shared and noisy.  Measurements taken within the same second are comparable; measurements from different
runs are not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import farandole
from farandole.bench.training import machine
from farandole.launch.local import launch
from farandole.launch.runtime import Runtime

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks"
"""The folder for results, as JSON and PNG files."""

Implementation = Callable[[], Any]


@contextmanager
def one_thread_rank(pin: bool) -> Iterator[Runtime]:
    """Join the job with one thread; if `pin` is true, pin this rank to its own core."""
    torch.set_num_threads(1)
    with farandole.init() as runtime:
        if pin:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[runtime.rank % len(cores)]})
        yield runtime


def take_turns(
    implementations: dict[str, Implementation],
    meet: Callable[[], Any],
    turns: int,
    calls: int,
    warm_ups: int = 0,
) -> dict[str, float]:
    """Return the seconds per call of each implementation: the median over `turns` of the mean over `calls`.

    `meet` is a barrier that is called before every measurement.  Each turn begins with `warm_ups` calls that are not
    measured, because the scheduler compensates threads on a shared core for the time that the previous implementation
    used.
    """
    for implementation in implementations.values():
        implementation()
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    for _ in range(turns):
        for name, implementation in implementations.items():
            for _ in range(warm_ups):
                implementation()
            meet()
            start = time.perf_counter()
            for _ in range(calls):
                implementation()
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def seconds_per_round(
    implementations: dict[str, Implementation],
    barrier: Callable[[], Any],
    rounds: int,
    *,
    calls: int = 1,
    warm_ups: int = 1,
) -> dict[str, list[float]]:
    """Return each implementation's seconds per call in each round, measured until the last rank has finished.

    The rounds follow `warm_ups` rounds that are not measured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    for number in range(warm_ups + rounds):
        for name, implementation in implementations.items():
            barrier()
            begun = time.perf_counter()
            for _ in range(calls):
                implementation()
            barrier()
            if number >= warm_ups:
                seconds[name].append((time.perf_counter() - begun) / calls)
    return seconds


def arguments(description: str) -> argparse.ArgumentParser:
    """Return the command-line parser of a benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return parser


def start(description: str, module: str, run_rank: Callable[[], None], *, pin: bool) -> None:
    """Start the ranks of a benchmark, or run as one of these ranks."""
    parser = arguments(description)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    options = parser.parse_args()
    if options.as_rank:
        run_rank()
    else:
        sys.exit(launch(module, ["--as-rank"], ranks=options.ranks, module=True, pin=pin))


def start_with_mpi(module: str, ranks: int, flags: list[str]) -> int:
    """Run a module on several ranks and return the exit status; start them with mpiexec if it is available."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    crowded = ranks > (os.cpu_count() or 1)
    if mpiexec and importlib.util.find_spec("mpi4py") and not crowded:
        command = [mpiexec, "-n", str(ranks), sys.executable, "-m", module, *flags]
    else:
        why = (
            "there are more ranks than cores, and MPICH waits by spinning"
            if crowded
            else "mpiexec or mpi4py is missing; to install both: pip install mpi4py mpich"
        )
        print(f"MPICH is not measured: {why}")
        pin = [] if crowded else ["--no-pin"]
        launcher = [sys.executable, "-m", "farandole", "launch", *pin, "--ranks", str(ranks)]
        command = [*launcher, "-m", module, *flags]
    return subprocess.run(command, check=False).returncode


def save(name: str, result: dict[str, Any]) -> Path:
    """Write a result and the description of the machine as JSON, and return the path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    return path


def human_bytes(count: int) -> str:
    """Format a number of bytes, such as `4 MiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count} B"


def human_seconds(seconds: float) -> str:
    """Format a duration, such as `12.3 us`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def records_table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each record and a column for each key."""
    return markdown_table(list(records[0]), [[str(value) for value in record.values()] for record in records])


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), line(["-" * width for width in widths]), *(line(row) for row in rows)])
