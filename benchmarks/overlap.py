"""Overlap an asynchronous all-reduce between two hosts with matrix products of the same duration.  Requires root.

    python -m benchmarks.overlap [--rate 1gbit]

The hosts are network namespaces on this machine, connected by a link with the given rate.  Each host has one rank,
which is pinned to a core.  *overlapped* is the saved fraction of the shorter time:
(all-reduce + products - both) / shorter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import (
    arguments,
    human_bytes,
    human_seconds,
    markdown_table,
    one_thread_rank,
    save,
    take_turns,
)
from benchmarks.namespaces import launch_on_hosts

SIZES = [1 << 20, 4 << 20, 16 << 20]


def run_rank(rate: str) -> None:
    """Measure as one rank; rank 0 prints the report."""
    with one_thread_rank(pin=True) as runtime:
        groups = {"farandole": None, "gloo": dist.new_group(backend="gloo")}
        result: dict[str, Any] = {"ranks": runtime.size, "rate": rate, "overlap": {}}
        for size in SIZES:
            for name, group in groups.items():
                calls = calls_of(size, group)
                result["overlap"][f"{human_bytes(size)}, {name}"] = take_turns(
                    calls, runtime.comm.barrier, 7, 5
                )
        if runtime.rank == 0:
            print(table(result["overlap"]))
            print(f"\nresults written to {save(f'overlap-{rate}', result)}")


def calls_of(size: int, group: dist.ProcessGroup | None) -> dict[str, Callable[[], Any]]:
    """Return three calls: an all-reduce, matrix products of about the same duration, and both at the same time."""
    tensor, matrix = torch.zeros(size // 4), torch.ones(256, 256)

    def blocking() -> None:
        dist.all_reduce(tensor, group=group)

    def times(count: int) -> None:
        for _ in range(count):
            matrix @ matrix

    count = torch.tensor(max(1, round(seconds_of(blocking) / seconds_of(lambda: times(10)) * 10)))
    dist.broadcast(count, 0)
    products = int(count)

    def both() -> None:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        times(products)
        work.wait()

    return {"all_reduce": blocking, "products": lambda: times(products), "both": both}


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the mean duration of three calls, after two warm-up calls."""
    call()
    call()
    start = time.perf_counter()
    for _ in range(3):
        call()
    return (time.perf_counter() - start) / 3


def table(figures: dict[str, dict[str, float]]) -> str:
    """Return a table with one row per size and backend."""
    rows = []
    for name, seconds in figures.items():
        alone, products, both = seconds["all_reduce"], seconds["products"], seconds["both"]
        overlapped = (alone + products - both) / min(alone, products)
        rows.append([name, *map(human_seconds, (alone, products, both)), f"{100 * overlapped:.0f} %"])
    return markdown_table(["between hosts", "all_reduce", "products", "both", "overlapped"], rows)


def main() -> None:
    """Simulate the hosts and start their ranks, or run as one of these ranks."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--rate", default="1gbit", help="rate of the link, in the notation of tc (default 1gbit)"
    )
    options = parser.parse_args()
    if options.as_rank:
        run_rank(options.rate)
        return
    sys.exit(launch_on_hosts("benchmarks.overlap", ["--as-rank", "--rate", options.rate], 1, options.rate))


if __name__ == "__main__":
    main()
