"""Measure further communication overheads: groups, objects, 16-bit types, and overlap with computation.

    python -m benchmarks.overheads

Two ranks are each pinned to a core, and farandole and Gloo alternate in the same processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import farandole
from benchmarks.measure import (
    arguments,
    human_seconds,
    markdown_table,
    one_thread_rank,
    save,
    start_with_mpi,
    take_turns,
)

GROUPS = 200
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Bench:
    """Runs the measurements on one rank."""

    def __init__(self, runtime: farandole.Runtime) -> None:
        self.runtime, self.comm = runtime, runtime.comm
        self.gloo = dist.new_group(backend="gloo")

    def turns(
        self, implementations: dict[str, Callable[[], Any]], calls: int, turns: int = 15
    ) -> dict[str, float]:
        """Return the seconds per call of each implementation."""
        return take_turns(implementations, self.comm.barrier, turns, calls)

    def groups(self) -> dict[str, float]:
        """Return the seconds that each backend needs to create `GROUPS` groups of two ranks."""
        seconds = {}
        for name in ("farandole", "gloo"):
            self.comm.barrier()
            begun = time.perf_counter()
            made = [dist.new_group([0, 1], backend=name) for _ in range(GROUPS)]
            seconds[name] = time.perf_counter() - begun
            for group in made:
                dist.destroy_process_group(group)
        return seconds

    def objects(self) -> dict[str, dict[str, float]]:
        """Measure all-gathers of a list of tensors and of an object."""
        tensor, parts = torch.zeros(256), [torch.empty(256) for _ in range(2)]
        thing = {"text": "x" * 1000}
        found: list[Any] = [None, None]
        return {
            "all_gather of a list, 1 KiB": self.turns(
                {
                    "communicator": lambda: self.comm.all_gather(parts, tensor),
                    "farandole": lambda: dist.all_gather(parts, tensor),
                    "gloo": lambda: dist.all_gather(parts, tensor, self.gloo),
                },
                100,
            ),
            "all_gather_object, 1 KiB": self.turns(
                {
                    "communicator": lambda: self.comm.all_gather_object(thing),
                    "farandole": lambda: dist.all_gather_object(found, thing),
                    "gloo": lambda: dist.all_gather_object(found, thing, self.gloo),
                },
                50,
            ),
        }

    def types(self, group: dist.ProcessGroup | None, sizes: list[int]) -> dict[int, dict[str, float]]:
        """Measure an all-reduce with the same number of bytes for each type."""
        found = {}
        for size in sizes:
            tensors = {name: torch.zeros(size // kind.itemsize, dtype=kind) for name, kind in TYPES.items()}
            implementations = {name: _all_reduce(tensor, group) for name, tensor in tensors.items()}
            found[size] = self.turns(implementations, max(2, (4 << 20) // size))
        return found

    def overlap(self) -> dict[str, float]:
        """Measure a 4 MiB asynchronous all-reduce and matrix products, separately and at the same time."""
        tensor, matrix = torch.zeros(1 << 20), torch.ones(512, 512)

        def product() -> None:
            for _ in range(4):
                matrix @ matrix

        def both() -> None:
            work = dist.all_reduce(tensor, async_op=True)
            product()
            work.wait()

        return self.turns(
            {
                "blocking": lambda: dist.all_reduce(tensor),
                "async, then wait": lambda: dist.all_reduce(tensor, async_op=True).wait(),
                "products": product,
                "both": both,
            },
            20,
        )


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], Any]:
    return lambda: dist.all_reduce(tensor, group=group)


def run_rank() -> None:
    """Measure as one rank; rank 0 prints the report."""
    with one_thread_rank(pin=True) as runtime:
        bench = Bench(runtime)
        result: dict[str, Any] = {
            "ranks": runtime.size,
            "groups": {f"{GROUPS} groups of 2 ranks": bench.groups()},
            "objects": bench.objects(),
            "types": {"shared memory": bench.types(None, [64 << 10, 256 << 10, 4 << 20, 16 << 20])},
            "overlap": bench.overlap(),
        }
        if "PMI_RANK" in os.environ:
            mpi = dist.new_group(backend="farandole-mpi")
            result["types"]["MPI"] = bench.types(mpi, [256 << 10, 16 << 20])
        if runtime.rank == 0:
            for operation in ("groups", "objects", "types", "overlap"):
                print(f"\n{table(operation, result)}")
            print(f"\nresults written to {save('overheads', result)}")


def table(operation: str, result: dict[str, Any]) -> str:
    """Return the table of one kind of measurement."""
    figures = result[operation]
    if operation == "types":
        rows = [
            [over, f"{int(size) >> 10} KiB", *(human_seconds(row[name]) for name in TYPES)]
            + [f"{row[name] / row['fp32']:.2f}" for name in ("bf16", "fp16")]
            for over, sizes in figures.items()
            for size, row in sizes.items()
        ]
        return markdown_table(["all_reduce over", "size", *TYPES, "bf16 / fp32", "fp16 / fp32"], rows)
    if operation == "overlap":
        ratio = figures["both"] / (figures["blocking"] + figures["products"])
        cells = [*(human_seconds(seconds) for seconds in figures.values()), f"{ratio:.2f}"]
        handed = human_seconds(max(0.0, figures["async, then wait"] - figures["blocking"]))
        return markdown_table([*figures, "both / sum", "hand-off"], [[*cells, handed]])
    names = ["communicator", "farandole", "gloo"]
    rows = [
        [what, *(human_seconds(row[name]) if name in row else "-" for name in names)]
        + [f"{row['gloo'] / row['farandole']:.1f}"]
        for what, row in figures.items()
    ]
    return markdown_table(["", *names, "x gloo"], rows)


if __name__ == "__main__":
    if arguments(__doc__).parse_args().as_rank:
        run_rank()
    else:
        sys.exit(start_with_mpi("benchmarks.overheads", 2, ["--as-rank"]))
