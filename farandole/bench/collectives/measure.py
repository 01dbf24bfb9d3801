"""Time collectives; at each size, the implementations run alternately.

Each rank times its own calls, from entry to return.  A barrier after each call prevents calls from overlapping; it is
not timed.  The OSU Micro-Benchmarks (D. K. Panda et al.) use the same method.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farandole.bench.collectives.implementations import Implementation
from farandole.bench.collectives.operations import Operation
from farandole.bench.collectives.setup import CollectivesSetup
from farandole.bench.collectives.values import count_errors, expected, values
from farandole.comm.communicator import Communicator

TURNS = 10
"""The number of turns per implementation; each turn runs an equal part of an implementation's iterations."""

Row = dict[str, Any]
"""The measurements of one backend at one size.

The keys are "operation", "backend", "size" and "iterations", and the keys of `table.COLUMNS` that were measured.
"""


@dataclass(frozen=True)
class Case:
    """An operation at one size, with the options for measuring it on the ranks of `comm`."""

    operation: Operation
    setup: CollectivesSetup
    size: int
    comm: Communicator

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of iterations and the number of warm-up iterations."""
        return self.setup.counts(self.operation, self.size)

    def row(self, implementation: Implementation, **figures: Any) -> Row:
        """Return the row for `implementation` with the measurements `figures`."""
        key = {"operation": self.operation.name, "backend": implementation.name, "size": self.size}
        return {**key, **figures, "iterations": self.counts[0]}


class Buffers:
    """The input and output buffers of an implementation for one case.

    If `case.setup.validate` is True, the object also contains the input values and the expected result.
    """

    def __init__(self, implementation: Implementation, case: Case) -> None:
        operation, setup, size, comm = case.operation, case.setup, case.size, case.comm
        kind, ranks = setup.kind, comm.size
        self.elements = operation.elements("whole", size, ranks, kind.itemsize)
        count = operation.elements(operation.input, size, ranks, kind.itemsize)
        self.input = implementation.empty(count, kind).zero_()
        self.output = implementation.empty(
            operation.elements(operation.output, size, ranks, kind.itemsize), kind
        ).zero_()
        self._result = self.input if operation.output == "none" else self.output
        self._ranks = ranks
        self._given: Tensor | None = None
        self._wanted: Tensor | None = None
        if setup.validate and operation.sized and not operation.messages:
            reduction = setup.reduction if operation.reduces else None
            self._given = values(comm.rank, count, kind, reduction).to(self.input.device)
            wanted = expected(operation, setup.reduction, comm.rank, ranks, self.elements, kind)
            self._wanted = None if wanted is None else wanted.to(self.input.device)

    def fill(self) -> None:
        """If the result will be checked, write the input values to `input` and wrong values to `output`."""
        if self._wanted is not None and self._result is self.output:
            self.output.copy_(self._wanted).add_(1)
        if self._given is not None:
            self.input.copy_(self._given)

    def errors(self) -> int:
        """Return the number of wrong elements in the result, or 0 if the expected result is unknown."""
        return 0 if self._wanted is None else count_errors(self._result, self._wanted, self._ranks)


class Trial:
    """Times one operation of one implementation at one size; with `validate`, also checks the results."""

    def __init__(self, implementation: Implementation, case: Case) -> None:
        self.implementation = implementation
        self.comm = case.comm
        self.checked = case.setup.validate and case.operation.sized
        self.buffers = Buffers(implementation, case)
        self.errors = 0
        self.seconds = 0.0
        self._call = implementation.call(
            case.operation, case.setup.reduction, self.buffers.input, self.buffers.output
        )

    def run(self, iterations: int) -> None:
        """Run `iterations` calls."""
        call, meet, clock = self._call, self.comm.barrier, time.perf_counter
        for _ in range(iterations):
            if self.checked:
                self.buffers.fill()
                meet()
            begun = clock()
            call()
            self.seconds += clock() - begun
            meet()
            if self.checked:
                self.errors += self.buffers.errors()

    def discard_warm_up(self) -> None:
        """Discard the measurements of the warm-up."""
        self.seconds = 0.0


def measure(implementations: list[Implementation], case: Case) -> list[Row]:
    """Measure `case` with each implementation, and return one row per implementation.

    Each rank computes its mean latency over the iterations.  The row contains the mean, the minimum and the maximum of
    these latencies over the ranks.
    """
    iterations, warmup = case.counts
    trials = [Trial(implementation, case) for implementation in implementations]
    for trial in trials:
        trial.run(warmup)
        trial.discard_warm_up()
    take_turns([trial.run for trial in trials], iterations, case.comm)
    rows = []
    for trial in trials:
        latencies = values_of_all_ranks(trial.seconds / iterations, case.comm) * 1e6
        average = float(latencies.mean())
        row = case.row(
            trial.implementation, avg_us=average, min_us=float(latencies.min()), max_us=float(latencies.max())
        )
        if trial.checked:
            row["errors"] = int(values_of_all_ranks(trial.errors, case.comm).sum())
        if case.operation.sized:
            row["algbw"] = case.size / average / 1e3  # bytes per us, in GB/s
            row["busbw"] = row["algbw"] * case.operation.bus(case.comm.size)
        rows.append(row)
    return rows


def take_turns(runs: list[Callable[[int], None]], iterations: int, comm: Communicator) -> None:
    """Run each function for `iterations` iterations in total, alternating between the functions.

    The argument of each function is the number of iterations to run.  This is a collective call.
    """
    for turn in range(TURNS):
        part = iterations * (turn + 1) // TURNS - iterations * turn // TURNS
        for run in runs if part else ():
            comm.barrier()
            run(part)


def values_of_all_ranks(number: float, comm: Communicator) -> Tensor:
    """Gather `number` from all ranks into a tensor, indexed by rank.  This is a collective call."""
    numbers = torch.zeros(comm.size, dtype=torch.float64)
    numbers[comm.rank] = number
    comm.all_reduce(numbers)
    return numbers
