"""Compare AdamW steps with optimizer state on disk against plain reads and writes of the same number of bytes.

    python -m benchmarks.offload [--gib 2] [--folder /tmp] [--record-mib 96]

Four implementations alternate in one process:

- a plain sequential test: read all records, then write all records, with several direct 4 MiB requests in flight;
- the record stream without an optimizer;
- the step of an optimizer whose records on the disk contain master weights and moments;
- the same step with the state in memory.

All units share one gradient tensor in memory.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import arguments, human_seconds, markdown_table, save
from farandole.data.wording import size
from farandole.memory.disk_file import aligned_buffer
from farandole.memory.offload_store import PART_BYTES, Transfer, measure_bandwidth
from farandole.memory.offloaded_optimizer import OffloadedOptimizer
from farandole.memory.record_stream import RecordStream, disk_records, host_records

TURNS = 5
BYTES_PER_ELEMENT = 12  # fp32: weights and AdamW's two moments
PLAIN_BUFFERS = 8


@dataclass
class Setup:
    """A model with equal units, which AdamW trains with its state in records."""

    units: int
    elements: int
    gradient: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.gradient = torch.randn(self.elements)

    def optimizer(self, open_stream: Callable[[Sequence[int]], RecordStream]) -> OffloadedOptimizer:
        """Return a new optimizer after its first step, which creates the moments."""
        pieces = [nn.Parameter(torch.zeros(1).expand(self.elements)) for _ in range(self.units)]
        optimizer = OffloadedOptimizer(
            torch.optim.AdamW(pieces, lr=1e-3), [[piece] for piece in pieces], open_stream
        )
        self.step(optimizer)
        return optimizer

    def step(self, optimizer: OffloadedOptimizer) -> None:
        """Run one step with the shared gradient, and flush the stream."""

        def before(unit: int) -> None:
            optimizer.units[unit][0].grad = self.gradient

        optimizer.step(before)
        optimizer.stream.flush()


def plain(stream: RecordStream, buffers: list[Tensor]) -> tuple[float, float]:
    """Return the seconds for reading all records in order, and for writing all records in order."""
    seconds = []
    for move in (stream.store.read, stream.store.write):
        start = time.perf_counter()
        moving: list[Transfer] = []
        for at, record in enumerate(stream.records):
            if at >= len(buffers):
                moving[at - len(buffers)].synchronize()
            moving.append(move(record, buffers[at % len(buffers)]))
        for transfer in moving:
            transfer.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


def compare(folder: str, nbytes: int, record_bytes: int, turns: int = TURNS) -> dict[str, Any]:
    """Return the median seconds of each implementation over the turns, and derived ratios."""
    setup = Setup(max(2, nbytes // record_bytes), record_bytes // BYTES_PER_ELEMENT)
    bandwidth = measure_bandwidth(folder)
    disk = setup.optimizer(lambda sizes: disk_records(folder, sizes))
    stream = disk.stream
    memory = setup.optimizer(host_records)
    total = 2 * sum(stream.record_bytes)
    # The plain test overwrites its data, so it uses a separate file of the same size.
    other = disk_records(folder, stream.record_bytes, "plain test")
    buffers = [aligned_buffer(record_bytes + PART_BYTES).random_() for _ in range(3)]
    plain(other, buffers)  # warm-up: the first write to a block differs from later writes
    taken: dict[str, list[float]] = {
        n: [] for n in ("plain read", "plain write", "stream", "step", "waited", "memory", "processor")
    }

    def timed(name: str, call: Callable[[], Any]) -> None:
        start = time.perf_counter()
        call()
        taken[name].append(time.perf_counter() - start)

    def pass_through() -> None:
        other.update(range(len(other.record_bytes)), lambda record, content: None)
        other.flush()

    try:
        for _ in range(turns):
            read, write = plain(other, buffers)
            taken["plain read"].append(read)
            taken["plain write"].append(write)
            timed("stream", pass_through)
            waited, used = stream.waited_s, time.process_time()
            timed("step", lambda: setup.step(disk))
            taken["waited"].append(stream.waited_s - waited)
            taken["processor"].append(time.process_time() - used)
            timed("memory", lambda: setup.step(memory))
    finally:
        for each in (disk, memory, other):
            each.close()
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    seconds["plain"] = statistics.median(
        map(sum, zip(taken["plain read"], taken["plain write"], strict=True))
    )
    ratios = [
        (read + write) / step
        for read, write, step in zip(taken["plain read"], taken["plain write"], taken["step"], strict=True)
    ]
    return {
        "access": stream.access,
        "records": len(stream.record_bytes),
        "record_bytes": record_bytes,
        "moved_bytes": total,
        "predicted": disk.budget(bandwidth).seconds,
        "seconds": seconds,
        "share_of_plain": statistics.median(ratios),
        "best_share": max(ratios),
        "load": os.getloadavg()[0],
    }


def table(result: dict[str, Any]) -> str:
    """Return a table with one row per implementation."""
    seconds, moved = result["seconds"], result["moved_bytes"]
    rows = []
    for what, name in [
        ("plain: read all, then write all", "plain"),
        ("stream, no optimizer", "stream"),
        ("AdamW, state on disk", "step"),
        ("AdamW, state in memory", "memory"),
    ]:
        taken = seconds[name]
        rows.append(
            [what, human_seconds(taken), f"{size(moved / taken)}/s", f"{seconds['plain'] / taken:.2f}"]
        )
    head = [f"{size(moved)} moved, {result['records']} records", "time", "throughput", "x plain"]
    return markdown_table(head, rows)


def notes(result: dict[str, Any]) -> str:
    """Return a paragraph about the time of an AdamW step with its state on disk."""
    seconds = result["seconds"]
    step = seconds["step"]
    return (
        f"Disk and access mode: {result['access']}. The plain test reads all records in "
        f"{human_seconds(seconds['plain read'])} and writes them in {human_seconds(seconds['plain write'])}. An "
        f"AdamW step with its state on disk reaches {100 * result['share_of_plain']:.0f} % of the "
        f"bandwidth of the plain test (median over the repetitions; best repetition: "
        f"{100 * result['best_share']:.0f} %). Such a step spends "
        f"{100 * seconds['waited'] / step:.0f} % of its time waiting for the disk, and uses "
        f"{human_seconds(seconds['processor'])} of processor time. The predicted time of a step is "
        f"{human_seconds(result['predicted'])}. The machine's load average was {result['load']:.0f}."
    )


def main() -> None:
    """Measure, print the table and write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state in GiB (default 2)")
    parser.add_argument(
        "--folder",
        default=tempfile.gettempdir(),
        help="folder on the disk to measure (default: the folder for temporary files)",
    )
    parser.add_argument(
        "--record-mib", type=int, default=96, help="size of a unit's state in MiB (default 96)"
    )
    options = parser.parse_args()
    result = compare(options.folder, int(options.gib * 2**30), options.record_mib << 20)
    print(table(result))
    print(notes(result))
    print(f"results written to {save('offload', result)}")


if __name__ == "__main__":
    main()
