"""Compare flat, hierarchical and compressed all-reduces between two hosts over a slow link.  Requires root.

    python -m benchmarks.hosts [--rate 1gbit] [--per-host 2] [--quick]

The hosts are network namespaces on this machine, connected by a link with the given rate (see `namespaces`), so all
ranks share the cores.  The limit is a TCP stream that, in the same run, sends the same number of bytes in both
directions at once.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import farandole
from benchmarks.measure import arguments, human_bytes, human_seconds, markdown_table, save, take_turns
from benchmarks.namespaces import launch_on_hosts
from benchmarks.picture import draw_latencies
from farandole.comm import Communicator, Options
from farandole.comm.compression import Cast, Compression, Int8

SIZES = [1 << 20, 4 << 20, 16 << 20, 64 << 20]
QUICK = [1 << 20, 16 << 20]
TURNS = 7
COMPRESSIONS: dict[str, Compression | None] = {
    "two levels": None,
    "+ bf16": Cast(torch.bfloat16),
    "+ fp16": Cast(torch.float16),
    "+ int8": Int8(),
}
FLAT, STREAM = "flat gloo", "stream"


class Stream:
    """A TCP connection over which two ranks send at the same time."""

    def __init__(self, rank: int, peer: int, address: str, port: int) -> None:
        if rank < peer:
            with socket.create_server((address, port)) as server:
                dist.barrier()
                self._socket = server.accept()[0]
        else:
            dist.barrier()
            self._socket = socket.create_connection((address, port))

    def exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send `outgoing`, and receive until `incoming` is full."""
        sender = threading.Thread(target=self._socket.sendall, args=(outgoing,))
        sender.start()
        at = 0
        while at < len(incoming):
            at += self._socket.recv_into(incoming[at:])
        sender.join()


def stream_of(rank: int, per_host: int, address: str, port: int) -> Stream | None:
    """Return the stream between the first ranks of the two hosts; None on other ranks."""
    if rank in (0, per_host):
        return Stream(rank, per_host - rank, address, port)
    dist.barrier()
    return None


def implementations_of(
    size: int, comms: dict[str, Communicator], gloo: Any, stream: Stream | None
) -> dict[str, Callable[[], Any]]:
    """Return all-reduces of `size` bytes in fp32, and the TCP stream."""
    tensor = torch.zeros(size // 4)
    implementations: dict[str, Callable[[], Any]] = {FLAT: lambda: dist.all_reduce(tensor, group=gloo)}
    for leaders, comm in comms.items():
        for name, compression in COMPRESSIONS.items():
            compressor = compression.for_tensor(tensor.numel()) if compression else None
            implementations[name + leaders] = _all_reduce(comm, tensor, compressor)
    incoming, outgoing = memoryview(bytearray(size)), memoryview(bytes(size))
    implementations[STREAM] = lambda: stream and stream.exchange(outgoing, incoming)
    return implementations


def _all_reduce(comm: Communicator, tensor: torch.Tensor, compressor: Any) -> Callable[[], Any]:
    return lambda: comm.all_reduce(tensor, compression=compressor)


def run_rank(per_host: int, rate: str, quick: bool) -> None:
    """Measure as one rank; rank 0 prints the report."""
    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"]) + 1
    with farandole.init() as runtime:
        ranks = list(range(runtime.size))
        one = dist.new_group(ranks, backend="farandole", pg_options=Options(leaders=1))
        comms = {"": runtime.comm} | ({", one leader": Communicator(one)} if per_host > 1 else {})
        gloo = dist.new_group(ranks, backend="gloo")
        stream = stream_of(runtime.rank, per_host, os.environ["MASTER_ADDR"], port)
        figures: dict[int, dict[str, float]] = {}
        for size in QUICK if quick else SIZES:
            implementations = implementations_of(size, comms, gloo, stream)
            figures[size] = take_turns(
                implementations, runtime.comm.barrier, 3 if quick else TURNS, max(1, (4 << 20) // size)
            )
        if runtime.rank == 0:
            result = {"ranks": runtime.size, "rate": rate, "all_reduce": figures}
            print(table(figures))
            if not quick:
                path = save(f"hosts-{runtime.size}-{rate}", result)
                draw_latencies(result, path.with_suffix(".png"))
                print(f"\nresults written to {path} and {path.with_suffix('.png').name}")


def table(figures: dict[Any, dict[str, float]]) -> str:
    """Return a table with one row per implementation: times, and speeds relative to flat Gloo and to the stream."""
    sizes = list(figures)
    rows = []
    for name in figures[sizes[0]]:
        cells = [name]
        for size in sizes:
            seconds = figures[size]
            cells.append(f"{human_seconds(seconds[name])}, {seconds[FLAT] / seconds[name]:.2f}x")
        cells.append(f"{figures[sizes[-1]][STREAM] / figures[sizes[-1]][name]:.2f}x")
        rows.append(cells)
    head = ["all_reduce", *(human_bytes(int(size)) for size in sizes), "x stream"]
    return markdown_table(head, rows)


def main() -> None:
    """Simulate the hosts and start their ranks, or run as one of these ranks."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--rate", default="1gbit", help="rate of the link, in the notation of tc (default 1gbit)"
    )
    parser.add_argument("--per-host", type=int, default=2, help="ranks on each host (default 2)")
    parser.add_argument(
        "--quick", action="store_true", help="measure only two sizes; do not save the results"
    )
    options = parser.parse_args()
    if options.as_rank:
        run_rank(options.per_host, options.rate, options.quick)
        return
    flags = ["--as-rank", "--rate", options.rate, "--per-host", str(options.per_host)]
    flags += ["--quick"] if options.quick else []
    sys.exit(launch_on_hosts("benchmarks.hosts", flags, options.per_host, options.rate))


if __name__ == "__main__":
    main()
