"""Measure all-reduce algorithms between hosts, for the command `farandole tune`.

`farandole launch` starts `python -m farandole.bench.tune SETUP`; under another launcher every rank calls `run`.

The algorithms are measured between the first 2, 3, ... hosts, with one rank per host.  Each algorithm is
measured several times, alternating with the other algorithms.  In each measurement, each rank computes the mean time
of several consecutive calls, and the maximum over the ranks is used.  The result is the minimum over the
measurements.  No barrier is needed between the calls, because an all-reduce cannot end before all ranks have started
it.

If all ranks share one host, each rank simulates a host, and messages are passed through memory.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import farandole
from farandole import native
from farandole.bench.collectives.measure import values_of_all_ranks
from farandole.bench.options import BenchError, check_output
from farandole.bench.training import machine
from farandole.comm import Options
from farandole.comm.algorithms.choice import ALL_REDUCE
from farandole.comm.algorithms.steps import finish
from farandole.comm.algorithms.table import Link, Table
from farandole.comm.backend.process_group import FarandoleProcessGroup
from farandole.comm.transport import WireTransport
from farandole.data.wording import counted
from farandole.data.wording import size as in_words
from farandole.launch.runtime import Runtime

TIMEOUT_S = 600.0
TURNS = 9
CHANNEL = 16
"""The channel of the messages that are measured; it separates them from the messages of other collectives."""
_BYTES_PER_TURN = 4 << 20  # limits the number of calls for large sizes
_MOST_CALLS = 30

Runs = dict[tuple[int, int, str], Callable[[], object]]
"""The functions to measure, keyed by (number of hosts or number of leaders, size in bytes, algorithm)."""


@dataclass(frozen=True)
class TuneSetup:
    """Options of `farandole tune`.

    Args:
        min: the smallest size in bytes.  Each further size is 4 times the previous size.
        max: the upper limit on the sizes in bytes.
        turns: the number of measurements per algorithm; only the fastest is used.
        link: the name of the link between the hosts; by default, a description of the transport.
        output: the file for the table, or None.
    """

    min: int = 64
    max: int = 16 << 20
    turns: int = TURNS
    link: str | None = None
    output: str | None = None

    def check(self) -> None:
        """Raise BenchError for invalid options."""
        if self.min < 4:
            raise BenchError(f"--min: expected at least 4 bytes (one element), got {self.min}")
        if self.max < self.min:
            raise BenchError(
                f"--max {in_words(self.max)} is less than --min {in_words(self.min)}; change one of them"
            )
        if self.turns < 1:
            raise BenchError(f"--turns: expected at least 1, got {self.turns}")
        check_output("--output", self.output)

    @property
    def sizes(self) -> list[int]:
        """Return the sizes to measure, in bytes, rounded down to multiples of the element size."""
        sizes, size = [], self.min
        while size <= self.max:
            sizes.append(size // 4 * 4)
            size *= 4
        return sizes

    def dump(self) -> str:
        """Return the setup as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> TuneSetup:
        """Convert the result of `dump` back to a setup."""
        return TuneSetup(**json.loads(text))


def check_ranks(ranks: int) -> None:
    """Raise BenchError if `ranks`, the number of hosts or simulated hosts, is less than 2."""
    if ranks < 2:
        raise BenchError("a single rank has no other rank to communicate with; use --ranks 2, or more hosts")


def run(setup: TuneSetup) -> None:
    """Run the measurements as one rank of this job; rank 0 prints the report and writes the table.

    Raises:
        BenchError: on all ranks, if the job has only one rank, or the C core is unavailable.
    """
    with farandole.init(timeout_s=TIMEOUT_S) as runtime:
        _Tuning(setup, runtime).run()


class _Tuning:
    def __init__(self, setup: TuneSetup, runtime: Runtime) -> None:
        group = runtime.comm.group
        if not isinstance(group, FarandoleProcessGroup) or not native.available():
            raise BenchError(
                "farandole tune requires the backend farandole and its C core, but "
                + (
                    native.why_unavailable()
                    or f"the ranks use the backend {group.name()}; use the backend farandole"
                )
            )
        self.setup = setup
        self.tensor = torch.zeros(setup.sizes[-1] // 4)
        self.comm = runtime.comm
        self.group = group
        self.combine = group.combine(self.tensor.dtype, "sum")
        self.spans = len(group.hosts) > 1
        self.members = group.hosts if self.spans else [[rank] for rank in range(runtime.size)]
        check_ranks(len(self.members))

    def run(self) -> None:
        torch.set_num_threads(1)
        hosts, ranks = len(self.members), self.comm.size
        if self.spans:
            self.say(
                f"# all-reduce (sum) of float32 between {hosts} hosts, one rank per host ({ranks} ranks in total)"
            )
        else:
            self.say(
                f"# all-reduce (sum) of float32 among {ranks} ranks, which simulate {ranks} hosts on one host;\n"
                "# messages pass through memory.  To measure a table for real use, run farandole tune on several hosts."
            )
        seconds = self.algorithms()
        measured = {
            **machine(),
            "hosts": hosts,
            "ranks": ranks,
            "messages": "TCP" if self.spans else "the memory of one host",
            "turns": self.setup.turns,
            "load": round(os.getloadavg()[0], 1),
        }
        link = Link(self.setup.link or str(measured["messages"]), seconds, measured, self.leaders())
        if self.comm.rank == 0:
            print("\n".join(report(link)), flush=True)
            if self.setup.output is not None:
                Path(self.setup.output).write_text(Table((link,)).dump())
                print(f'# to use the table: farandole.comm.Options(table="{self.setup.output}") on all hosts')

    def algorithms(self) -> dict[int, dict[int, dict[str, float]]]:
        """Return the time of each all-reduce in seconds: `times[hosts][size][algorithm]`."""
        runs: Runs = {}
        for hosts in range(2, len(self.members) + 1):
            ranks = [members[0] for members in self.members[:hosts]]
            transport = self.group.between(ranks, CHANNEL) if self.comm.rank in ranks else None
            for size in self.setup.sizes:
                for name in ALL_REDUCE:
                    runs[hosts, size, name] = partial(self.reduce, transport, size, name)
        found: dict[int, dict[int, dict[str, float]]] = {}
        for (hosts, size, name), seconds in self.take_turns(runs).items():
            found.setdefault(hosts, {}).setdefault(size, {})[name] = seconds
        return found

    def reduce(self, transport: WireTransport | None, size: int, name: str) -> None:
        if transport is None:
            return
        try:
            finish(ALL_REDUCE[name](transport, self.tensor[: size // 4], self.combine), TIMEOUT_S)
        finally:
            transport.release()

    def leaders(self) -> dict[int, dict[int, float]]:
        """Return the time in seconds of each all-reduce among all ranks: `times[size][leaders_per_host]`."""
        most = min(len(members) for members in self.members)
        if not self.spans or most < 2:
            return {}
        groups = [
            dist.new_group(backend="farandole", pg_options=Options(leaders=count + 1))
            for count in range(most)
        ]
        runs: Runs = {
            (count, size, ""): partial(dist.all_reduce, self.tensor[: size // 4], group=group)
            for size in self.setup.sizes
            for count, group in enumerate(groups, 1)
        }
        found: dict[int, dict[int, float]] = {}
        for (count, size, _), seconds in self.take_turns(runs).items():
            found.setdefault(size, {})[count] = seconds
        for group in groups:
            dist.destroy_process_group(group)
        return found

    def take_turns(self, runs: Runs) -> dict[tuple[int, int, str], float]:
        """Measure each function in `runs` several times, and return its minimum time in seconds."""
        least = dict.fromkeys(runs, math.inf)
        # a temporary disturbance affects one turn of several runs, but not all turns of one run
        for turn in range(1 + self.setup.turns):
            for key, run in runs.items():
                calls = max(1, min(_MOST_CALLS, _BYTES_PER_TURN // key[1])) if turn else 1
                self.comm.barrier()
                begun = time.perf_counter()
                for _ in range(calls):
                    run()
                seconds = float(values_of_all_ranks((time.perf_counter() - begun) / calls, self.comm).max())
                if turn:  # the first turn is a warm-up
                    least[key] = min(least[key], seconds)
        return least

    def say(self, line: str) -> None:
        if self.comm.rank == 0:
            print(line, flush=True)


def report(link: Link) -> list[str]:
    """Return the lines of the report: measured and predicted times, fastest algorithms, and fitted parameters."""
    names, table = list(ALL_REDUCE), Table((link,))
    others = len(link.seconds) > 1
    source = "the other numbers of hosts" if others else "all measurements"
    lines = [f"# model: cost of each algorithm, with a latency and a bandwidth fitted to {source}"]
    heads = [f"{f'{name}(us)':>18}{'model':>12}" for name in names]
    lines.append(f"{'# Hosts':<9}{'Size':<12}{''.join(heads)}  Fastest")
    for hosts, sizes in link.seconds.items():
        fitted = link.without(hosts) or link
        for size, times in sizes.items():
            cells = [
                f"{times[name] * 1e6:>18.1f}{fitted.model(name, hosts, size) * 1e6:>12.1f}" for name in names
            ]
            lines.append(f"{hosts:<9}{size:<12}{''.join(cells)}  {table.best(hosts, size)}")
    errors = ", ".join(f"{name} {_typical_error(link, name):.0f} %" for name in names)
    bandwidth = f", {1e-9 / link.fit.seconds_per_byte:.2f} GB/s" if link.fit.seconds_per_byte else ""
    lines += [
        "",
        f"# message latency: {link.fit.latency_s * 1e6:.1f} us{bandwidth}; median model error: {errors}",
    ]
    if link.leaders:
        counts = list(next(iter(link.leaders.values())))
        heads = [f"{f'{count} leaders(us)' if count > 1 else '1 leader(us)':>18}" for count in counts]
        lines += ["", "# all ranks of all hosts, by the number of leaders per host (Options(leaders=...))"]
        lines.append(f"{'# Size':<12}{''.join(heads)}  Fastest")
        for size, by_count in link.leaders.items():
            fastest = min(by_count, key=lambda count: by_count[count])
            cells = [f"{by_count[count] * 1e6:>18.1f}" for count in counts]
            lines.append(f"{size:<12}{''.join(cells)}  {counted(fastest, 'leader')}")
    return lines


def _typical_error(link: Link, name: str) -> float:
    """Return the median relative error of the algorithm's cost model, in percent."""
    errors = [
        abs(link.model(name, hosts, size) / times[name] - 1)
        for hosts, sizes in link.seconds.items()
        for size, times in sizes.items()
    ]
    return 100 * statistics.median(errors)


if __name__ == "__main__":
    run(TuneSetup.load(sys.argv[1]))
