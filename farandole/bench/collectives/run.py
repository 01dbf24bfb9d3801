"""Benchmark the latency and bandwidth of collectives, with all installed backends in one run.

`farandole launch` and mpiexec start `python -m farandole.bench.collectives.run SETUP`; under other launchers, every rank
calls `run`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import farandole
from farandole.bench.collectives.backends import choose, mpiexec_for, why_unsupported, without_mpiexec
from farandole.bench.collectives.implementations import make_implementations
from farandole.bench.collectives.measure import Case, Row, measure, values_of_all_ranks
from farandole.bench.collectives.messages import measure_messages
from farandole.bench.collectives.operations import OPERATIONS, Operation
from farandole.bench.collectives.overlap import measure_overlap
from farandole.bench.collectives.setup import CollectivesSetup
from farandole.bench.collectives.table import Table
from farandole.bench.options import BenchError
from farandole.bench.training import machine
from farandole.launch.cores import affinity, divide_cores, physical_cores
from farandole.launch.local import launch
from farandole.launch.runtime import Runtime

TIMEOUT_S = 3600.0
"""The timeout of the job's process group in seconds; a rank may wait this long for a busy rank."""


def start(setup: CollectivesSetup, ranks: int) -> int:
    """Check the setup, launch `ranks` ranks of the benchmark on this host, and return the exit status of the job.

    If MPI is measured, mpiexec starts the ranks; otherwise, `farandole launch` starts them.
    """
    setup.check(ranks)
    mpiexec = mpiexec_for(setup, ranks)
    launcher = "mpirun" if mpiexec else without_mpiexec(setup, ranks)
    setup = choose(setup, ranks, launcher)
    setup.check_memory(ranks, ranks, _copies(setup))
    if mpiexec is None:
        return launch("farandole.bench.collectives.run", [setup.dump()], ranks=ranks, module=True, pin=False)
    program = [sys.executable, "-m", "farandole.bench.collectives.run", setup.dump()]
    return subprocess.run([mpiexec, "-n", str(ranks), *program], check=False).returncode


def run(setup: CollectivesSetup) -> None:
    """Run the benchmark as one rank of this job; rank 0 prints the report.

    Raises:
        BenchError: on all ranks, if the benchmark cannot run with `setup`.
        SystemExit: on rank 0, if validation finds wrong values.
    """
    with farandole.init(timeout_s=TIMEOUT_S) as runtime:
        rows = _Benchmark(setup, runtime).run()
    wrong = [f"{row['operation']} of {row['backend']}" for row in rows if row.get("errors")]
    if wrong and runtime.rank == 0:
        sys.exit(f"wrong values: {', '.join(dict.fromkeys(wrong))}")


def _copies(setup: CollectivesSetup) -> int:
    """Return the number of backends in `setup` whose buffers are in host memory: all except NCCL."""
    return sum(name != "nccl" for name in setup.backends)


class _Benchmark:
    def __init__(self, setup: CollectivesSetup, runtime: Runtime) -> None:
        self.setup = setup
        self.runtime = runtime
        self.comm = runtime.comm
        self.implementations = make_implementations(setup.backends, runtime)
        self.rows: list[Row] = []

    def run(self) -> list[Row]:
        self.check_memory()
        torch.set_num_threads(1)
        if self.setup.pin:
            self.pin()
        for name, reason in self.setup.left_out.items():
            self.say(f"# without {name}: {reason}")
        for name in self.setup.operations:
            self.measure(OPERATIONS[name])
        if self.runtime.rank == 0:
            self.report()
        return self.rows

    def measure(self, operation: Operation) -> None:
        setup, table = self.setup, Table(operation, self.setup)
        reasons = {each.name: why_unsupported(each.name, operation, setup) for each in self.implementations}
        able = [each for each in self.implementations if reasons[each.name] is None]
        method = measure_messages if operation.messages else measure_overlap if setup.overlap else measure
        if self.rows:
            self.say("")
        for name, reason in reasons.items():
            if reason is not None:
                self.say(f"# without {name}: {reason}")
        self.say(table.head(setup, self.comm.size))
        for size in setup.sizes(operation, self.comm.size):
            for row in method(able, Case(operation, setup, size, self.comm)):
                self.rows.append(row)
                self.say(table.line(row))

    def check_memory(self) -> None:
        """Raise BenchError on all ranks if a host has too little memory.  This is a collective call."""
        refusal = ""
        try:
            self.setup.check_memory(self.comm.size, self.runtime.local_size, _copies(self.setup))
        except BenchError as error:
            refusal = str(error)
        if values_of_all_ranks(bool(refusal), self.comm).any():
            raise BenchError(
                refusal or "another host has too little memory for the buffers; use a smaller --max"
            )

    def pin(self) -> None:
        """Pin this rank to its own cores, independently of the launcher."""
        division = divide_cores(self.runtime.local_size, physical_cores(affinity()), threads=1)
        processors = division.shares[self.runtime.local_rank].processors
        if processors:
            os.sched_setaffinity(0, processors)
        self.say(f"# {division.summary.split(';')[0]}")

    def report(self) -> None:
        if self.setup.json is not None:
            Path(self.setup.json).write_text(json.dumps(self.result(), indent=1) + "\n")
        if self.setup.picture is not None:
            from farandole.bench.collectives.picture import draw

            draw(self.rows, self.comm.size, self.setup.picture)

    def result(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        setup = asdict(replace(self.setup, json=None, picture=None))
        return {
            "machine": machine(),
            "launcher": self.runtime.launcher,
            "ranks": self.comm.size,
            "setup": {key: value for key, value in setup.items() if key not in ("json", "picture")},
            "rows": self.rows,
        }

    def say(self, line: str) -> None:
        if self.runtime.rank == 0:
            print(line, flush=True)


if __name__ == "__main__":
    run(CollectivesSetup.load(sys.argv[1]))
