"""Compare the backend `farandole-mpi` with mpi4py's own calls on the same MPI library, alternating in one run.

    python -m benchmarks.mpi [--ranks 2] [--quick]

mpi4py selects the MPI library; to measure several libraries, use a separate environment for each.  mpi4py's calls use
the same processes and buffers as the backend, and the same thread level, "serialized".
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import arguments, human_bytes, human_seconds, markdown_table, save, take_turns
from farandole.comm.mpi.engine import engine
from farandole.comm.mpi.library import describe_library

SIZES = [8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
QUICK = [1 << 10, 64 << 10, 1 << 20]
OTHER_SIZES = [1 << 10, 64 << 10, 4 << 20]
OURS, WORK, THEIRS, NON_BLOCKING, HALF = "farandole-mpi", "async, then wait", "mpi4py", "mpi4py, I...", "bf16"


def all_reduce(mpi: Any, size: int) -> dict[str, Callable[[], Any]]:
    """Return all-reduces of `size` bytes in fp32, and in bf16, which MPI cannot reduce."""
    ours, half = torch.zeros(max(1, size // 4)), torch.zeros(max(1, size // 2), dtype=torch.bfloat16)
    buffer, world = ours.numpy(), mpi.COMM_WORLD

    def non_blocking() -> None:
        world.Iallreduce(mpi.IN_PLACE, buffer).Wait()

    def work() -> None:
        handle = dist.all_reduce(ours, async_op=True)
        assert handle is not None
        handle.wait()

    return {
        OURS: lambda: dist.all_reduce(ours),
        WORK: work,
        HALF: lambda: dist.all_reduce(half),
        THEIRS: lambda: world.Allreduce(mpi.IN_PLACE, buffer),
        NON_BLOCKING: non_blocking,
    }


def others(mpi: Any, size: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return calls to other collectives; `size` is the larger of their input and output sizes per rank."""
    ranks, world = mpi.COMM_WORLD.Get_size(), mpi.COMM_WORLD
    count = size // 4 // ranks * ranks
    whole, part, target = torch.zeros(count), torch.zeros(count // ranks), torch.zeros(count)
    w, p, t = whole.numpy(), part.numpy(), target.numpy()
    return {
        "all_gather": {
            OURS: lambda: dist.all_gather_into_tensor(whole, part),
            THEIRS: lambda: world.Allgather(p, w),
        },
        "reduce_scatter": {
            OURS: lambda: dist.reduce_scatter_tensor(part, whole),
            THEIRS: lambda: world.Reduce_scatter_block(w, p),
        },
        "broadcast": {OURS: lambda: dist.broadcast(whole, 0), THEIRS: lambda: world.Bcast(w, 0)},
        "all_to_all": {
            OURS: lambda: dist.all_to_all_single(target, whole),
            THEIRS: lambda: world.Alltoall(w, t),
        },
    }


def table(operation: str, figures: dict[int, dict[str, float]]) -> str:
    """Return a table with one row per size: times, and farandole's time divided by mpi4py's time."""
    columns = list(next(iter(figures.values())))
    rows = [
        [human_bytes(size), *(human_seconds(row[name]) for name in columns), f"{row[OURS] / row[THEIRS]:.2f}"]
        for size, row in figures.items()
    ]
    return markdown_table([operation, *columns, "farandole / mpi4py"], rows)


def run_rank(quick: bool) -> None:
    """Measure as one rank; rank 0 prints the report."""
    torch.set_num_threads(1)
    dist.init_process_group("farandole-mpi")
    mpi = engine().mpi
    library = describe_library(mpi)
    result: dict[str, Any] = {"ranks": dist.get_world_size(), "library": library, "all_reduce": {}}

    def measure(implementations: dict[str, Callable[[], Any]], size: int) -> dict[str, float]:
        calls = max(3, min(200, (2 << 20) // size))
        turns = 5 if quick else 15 if size <= 16 << 20 else 7
        return take_turns(implementations, dist.barrier, turns, calls)

    for size in QUICK if quick else SIZES:
        result["all_reduce"][size] = measure(all_reduce(mpi, size), size)
    for size in [] if quick else OTHER_SIZES:
        for operation, implementations in others(mpi, size).items():
            result.setdefault(operation, {})[size] = measure(implementations, size)
    if dist.get_rank() == 0:
        print(f"{library}, {result['ranks']} ranks")
        for operation, figures in result.items():
            if isinstance(figures, dict):
                print(f"\n{table(operation, figures)}")
        if not quick:
            name = library.split()[0].lower()
            path = save(f"mpi-{name}-{result['ranks']}", result)
            print(f"\nresults written to {path}")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks with this environment's mpiexec, or run as one of these ranks."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument(
        "--quick", action="store_true", help="measure only three sizes; do not save the results"
    )
    options = parser.parse_args()
    if options.as_rank:
        run_rank(options.quick)
        return
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if mpiexec is None:
        sys.exit(
            "expected mpiexec next to the interpreter or on PATH, found none; to install it: pip install mpi4py mpich"
        )
    quick = ["--quick"] if options.quick else []
    command = [mpiexec, "-n", str(options.ranks), sys.executable, "-m", "benchmarks.mpi", "--as-rank", *quick]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
