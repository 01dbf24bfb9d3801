"""Compare messages between two ranks over farandole, Gloo and MPICH, which alternate in the same processes.

    python -m benchmarks.point_to_point

Each rank is pinned to a core.  Latency is half the duration of a ping-pong; bandwidth is measured with 64 messages in
flight.  MPICH is measured if mpi4py and mpiexec are installed (`pip install mpi4py mpich`), with its default thread
level.
"""

from __future__ import annotations

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

SIZES = [8, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
IN_FLIGHT = 64
MANY = 1000
COLUMNS = ["communicator", "farandole", "gloo", "mpich"]


class Peer:
    """Builds message exchanges between this rank and the other rank, for each implementation."""

    def __init__(self, runtime: farandole.Runtime) -> None:
        self.comm, self.rank, self.other = runtime.comm, runtime.rank, 1 - runtime.rank
        self.gloo = dist.new_group(backend="gloo")
        self.mpi = None
        if "PMI_RANK" in os.environ:
            from mpi4py import MPI

            self.mpi = MPI.COMM_WORLD

    def latency(self, size: int) -> dict[str, Callable[[], Any]]:
        """Return a round trip of `size` bytes for each implementation."""
        tensor = torch.zeros(size // 4)
        array, comm, other = tensor.numpy(), self.comm, self.other
        calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "communicator": (lambda: comm.send(tensor, other), lambda: comm.recv(tensor, other)),
            "farandole": (lambda: dist.send(tensor, other), lambda: dist.recv(tensor, other)),
            "gloo": (
                lambda: dist.send(tensor, other, self.gloo),
                lambda: dist.recv(tensor, other, self.gloo),
            ),
        }
        if (mpi := self.mpi) is not None:
            calls["mpich"] = (lambda: mpi.Send(array, other), lambda: mpi.Recv(array, other))
        return {name: self._round_trip(*pair) for name, pair in calls.items()}

    def _round_trip(self, send: Callable[[], Any], receive: Callable[[], Any]) -> Callable[[], None]:
        first, second = (send, receive) if self.rank == 0 else (receive, send)

        def trip() -> None:
            first()
            second()

        return trip

    def bandwidth(self, size: int, messages: int = IN_FLIGHT) -> dict[str, Callable[[], Any]]:
        """Return calls that send `messages` messages of `size` bytes one way and wait for a reply."""
        tensor, answer = torch.zeros(size // 4), torch.zeros(1)
        array, answer_array, comm, other = tensor.numpy(), answer.numpy(), self.comm, self.other

        def by_torch(group: dist.ProcessGroup | None) -> None:
            begin = dist.isend if self.rank == 0 else dist.irecv
            for work in [begin(tensor, other, group) for _ in range(messages)]:
                work.wait()
            (dist.recv if self.rank == 0 else dist.send)(answer, other, group)

        def by_communicator() -> None:
            begin = comm.isend if self.rank == 0 else comm.irecv
            for work in [begin(tensor, other) for _ in range(messages)]:
                work.wait()
            (comm.recv if self.rank == 0 else comm.send)(answer, other)

        def by_mpi() -> None:
            begin = self.mpi.Isend if self.rank == 0 else self.mpi.Irecv
            for request in [begin(array, other) for _ in range(messages)]:
                request.Wait()
            (self.mpi.Recv if self.rank == 0 else self.mpi.Send)(answer_array, other)

        calls: dict[str, Callable[[], Any]] = {
            "communicator": by_communicator,
            "farandole": lambda: by_torch(None),
            "gloo": lambda: by_torch(self.gloo),
        }
        if self.mpi is not None:
            calls["mpich"] = by_mpi
        return calls

    def measure(self, implementations: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
        """Return the seconds per call of each implementation."""
        return take_turns(implementations, self.comm.barrier, 15, calls)


def run_rank() -> None:
    """Measure as one rank; rank 0 prints the report."""
    with one_thread_rank(pin=True) as runtime:
        peer = Peer(runtime)
        result: dict[str, Any] = {"ranks": runtime.size, "latency": {}, "bandwidth": {}}
        for size in SIZES:
            calls = 200 if size <= 64 << 10 else max(2, (16 << 20) // size)
            trips = peer.measure(peer.latency(size), calls)
            result["latency"][size] = {name: seconds / 2 for name, seconds in trips.items()}
        for size in [size for size in SIZES if size <= 16 << 20]:
            windows = peer.measure(peer.bandwidth(size), 1 if size >= 1 << 20 else 4)
            result["bandwidth"][size] = {name: seconds / IN_FLIGHT for name, seconds in windows.items()}
        result["many"] = {MANY: peer.measure(peer.bandwidth(4, MANY), 1)}
        if runtime.rank == 0:
            for operation in ("latency", "bandwidth", "many"):
                print(f"\n{table(operation, result[operation])}")
            path = save("point-to-point", result)
            draw_latencies(result, path.with_suffix(".png"))
            print(f"\nresults written to {path} and {path.with_suffix('.png').name}")


def table(operation: str, figures: dict[Any, dict[str, float]]) -> str:
    """Return a table with one row per size: latencies or bandwidths, and speedups over MPICH and Gloo."""
    present = [column for column in COLUMNS if any(column in row for row in figures.values())]
    head = [
        operation,
        *present,
        "x gloo",
        *(["communicator x mpich", "x mpich"] if "mpich" in present else []),
    ]
    rows = []
    for size, row in figures.items():
        if operation == "bandwidth":
            shown = [f"{int(size) / row[name] / 1e9:.3g} GB/s" for name in present]
        else:
            shown = [human_seconds(row[name]) for name in present]
        label = f"{MANY} floats" if operation == "many" else human_bytes(int(size))
        cells = [label, *shown, f"{row['gloo'] / row['farandole']:.1f}"]
        if "mpich" in present:
            cells += [f"{row['mpich'] / row[name]:.2f}" for name in ("communicator", "farandole")]
        rows.append(cells)
    return markdown_table(head, rows)


if __name__ == "__main__":
    if arguments(__doc__).parse_args().as_rank:
        run_rank()
    else:
        sys.exit(start_with_mpi("benchmarks.point_to_point", 2, ["--as-rank"]))
