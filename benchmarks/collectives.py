"""Compare collectives of farandole, Gloo and MPICH, which alternate in the same processes.

    python -m benchmarks.collectives [--ranks 2] [--pin] [--quick]

MPICH is measured if mpi4py and mpiexec are installed (`pip install mpi4py mpich`); mpiexec then starts the ranks.
MPICH uses the thread level "serialized", which is the fastest level that allows threads.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import farandole
from benchmarks.measure import (
    arguments,
    human_bytes,
    human_seconds,
    markdown_table,
    one_thread_rank,
    save,
    start_with_mpi,
    take_turns,
)
from benchmarks.picture import draw_latencies
from farandole.comm.dtypes import TYPES

SIZES = [
    8,
    64,
    1 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
    128 << 20,
    256 << 20,
]
QUICK = [8, 1 << 10, 64 << 10, 4 << 20]
OTHER_SIZES = [1 << 10, 64 << 10, 4 << 20, 64 << 20]
OTHERS = ["all_gather", "reduce_scatter", "broadcast", "all_to_all"]
COLUMNS = ["persistent", "communicator", "farandole", "shared buffer", "core", "gloo", "mpich", "copy"]


class Bench:
    """Builds and measures the implementations on one rank."""

    def __init__(self, runtime: farandole.Runtime) -> None:
        self.comm = runtime.comm
        self.size = runtime.size
        self.gloo = dist.new_group(backend="gloo")
        self.mpi = _mpi()
        self.host = self.comm.group._host  # type: ignore[attr-defined]  # the C core, without torch

    def all_reduce(self, size: int) -> dict[str, Callable[[], Any]]:
        """Return all-reduces of `size` bytes in fp32; the entry `copy` instead copies the same number of bytes."""
        count = max(1, size // 4)
        ours, theirs, source = torch.zeros(count), torch.zeros(count), torch.zeros(count)
        shared = self.comm.empty(count).zero_()
        address, kind, core, host = (
            ours.data_ptr(),
            TYPES[ours.dtype],
            self.host.core.frd_all_reduce,
            self.host,
        )
        implementations: dict[str, Callable[[], Any]] = {
            "persistent": self.comm.all_reduce_init(ours),
            "communicator": lambda: self.comm.all_reduce(ours),
            "farandole": lambda: dist.all_reduce(ours),
            "shared buffer": lambda: dist.all_reduce(shared),
            "core": lambda: core(host.handle, address, count, kind, 0, 0),
            "gloo": lambda: dist.all_reduce(theirs, group=self.gloo),
            "copy": lambda: theirs.copy_(source),
        }
        if self.mpi is not None:
            mpi, buffer = self.mpi, theirs.numpy()
            implementations["mpich"] = lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, buffer)
        return implementations

    def other(self, operation: str, size: int) -> dict[str, Callable[[], Any]]:
        """Return calls to another collective; `size` is the larger of its input and output sizes per rank."""
        count = size // 4 // self.size * self.size
        whole, part, target = torch.zeros(count), torch.zeros(count // self.size), torch.zeros(count)
        shared = self.comm.empty(count).zero_()
        calls: dict[str, Callable[[torch.Tensor, Any], Any]] = {
            "all_gather": lambda t, group: dist.all_gather_into_tensor(t, part, group=group),
            "reduce_scatter": lambda t, group: dist.reduce_scatter_tensor(part, t, group=group),
            "broadcast": lambda t, group: dist.broadcast(t, 0, group=group),
            "all_to_all": lambda t, group: dist.all_to_all_single(target, t, group=group),
        }
        call, comm = calls[operation], self.comm
        prepared, direct = {
            "all_gather": (comm.all_gather_init, lambda: comm.all_gather(whole, part)),
            "reduce_scatter": (comm.reduce_scatter_init, lambda: comm.reduce_scatter(part, whole)),
            "broadcast": (comm.broadcast_init, lambda: comm.broadcast(whole)),
            "all_to_all": (comm.all_to_all_init, lambda: comm.all_to_all(target, whole)),
        }[operation]
        arguments = {"all_gather": (whole, part), "reduce_scatter": (part, whole), "broadcast": (whole,)}
        implementations: dict[str, Callable[[], Any]] = {
            "persistent": prepared(*arguments.get(operation, (target, whole))),
            "communicator": direct,
            "farandole": lambda: call(whole, None),
            "shared buffer": lambda: call(shared, None),
            "gloo": lambda: call(whole, self.gloo),
            "copy": lambda: target.copy_(whole),
        }
        if self.mpi is not None:
            world, w, p, t = self.mpi.COMM_WORLD, whole.numpy(), part.numpy(), target.numpy()
            implementations["mpich"] = {
                "all_gather": lambda: world.Allgather(p, w),
                "reduce_scatter": lambda: world.Reduce_scatter_block(w, p),
                "broadcast": lambda: world.Bcast(w, 0),
                "all_to_all": lambda: world.Alltoall(w, t),
            }[operation]
        return implementations

    def measure(self, implementations: dict[str, Callable[[], Any]], size: int) -> dict[str, float]:
        """Return the seconds per call of each implementation."""
        crowded = self.size > (os.cpu_count() or 1)
        most, least = (10, 1) if crowded or size > 16 << 20 else (100, 5)
        calls = max(least, min(most, (1 << 20) // size))
        turns = 15 if size <= 16 << 20 else 7
        return take_turns(implementations, self.comm.barrier, turns, calls, warm_ups=4 if crowded else 0)


def _mpi() -> Any:
    if importlib.util.find_spec("mpi4py") is None or "PMI_RANK" not in os.environ:
        return None
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    return MPI


def run_rank(quick: bool, pin: bool) -> None:
    """Measure as one rank; rank 0 prints the report."""
    with one_thread_rank(pin) as runtime:
        bench = Bench(runtime)
        result: dict[str, Any] = {"ranks": runtime.size, "pinned": pin, "all_reduce": {}}
        crowded = runtime.size > (os.cpu_count() or 1)
        sizes = QUICK if quick else [s for s in SIZES if s <= 16 << 20] if crowded else SIZES
        for size in sizes:
            result["all_reduce"][size] = bench.measure(bench.all_reduce(size), size)
            if runtime.rank == 0:
                print(
                    human_bytes(size),
                    {k: human_seconds(v) for k, v in result["all_reduce"][size].items()},
                    flush=True,
                )
        for operation in [] if quick or crowded or pin else OTHERS:
            result[operation] = {
                size: bench.measure(bench.other(operation, size), size) for size in OTHER_SIZES
            }
        if runtime.rank == 0:
            report(result, quick)


def table(operation: str, figures: dict[Any, dict[str, float]]) -> str:
    """Return a table with one row per size: times, and speedups over Gloo, MPICH and a plain copy."""
    present = [column for column in COLUMNS if any(column in row for row in figures.values())]
    head = [operation, *present, "x gloo", "x gloo, shared"]
    if "core" in present:
        head += ["core x mpich", "core / copy limit"]
    elif "mpich" in present:
        head += ["persistent x mpich", "x mpich", "copy limit"]
    rows = []
    for size, row in figures.items():
        cells = [human_bytes(int(size)), *(human_seconds(row[name]) for name in present)]
        cells += [f"{row['gloo'] / row['farandole']:.1f}", f"{row['gloo'] / row['shared buffer']:.1f}"]
        if "core" in present:
            cells.append(f"{row['mpich'] / row['core']:.1f}" if "mpich" in row else "-")
            cells.append(f"{100 * row['copy'] / row['core']:.0f} %")
        elif "mpich" in present:
            cells += [f"{row['mpich'] / row[name]:.2f}" for name in ("persistent", "farandole")]
            cells.append(f"{100 * row['copy'] / row['farandole']:.0f} %")
        rows.append(cells)
    return markdown_table(head, rows)


def report(result: dict[str, Any], quick: bool) -> None:
    """Print the tables; unless `quick` is true, also write JSON and draw the picture."""
    for operation, figures in result.items():
        if isinstance(figures, dict):
            print(f"\n{table(operation, figures)}")
    if not quick:
        path = save(f"collectives-{result['ranks']}{'-pinned' if result['pinned'] else ''}", result)
        draw_latencies(result, path.with_suffix(".png"))
        print(f"\nresults written to {path} and {path.with_suffix('.png').name}")


def main() -> None:
    """Start the ranks, with mpiexec if available, or run as one of these ranks."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument(
        "--quick", action="store_true", help="measure only four sizes; do not save the results"
    )
    parser.add_argument("--pin", action="store_true", help="pin each rank to its own core")
    options = parser.parse_args()
    if options.as_rank:
        run_rank(options.quick, options.pin)
        return
    flags = [flag for flag in ("--quick", "--pin") if getattr(options, flag.strip("-"))]
    sys.exit(start_with_mpi("benchmarks.collectives", options.ranks, ["--as-rank", *flags]))


if __name__ == "__main__":
    main()
