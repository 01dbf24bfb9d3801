"""Measure how much of a collective overlaps with computation.

First, the collective is timed alone, and an equally long computation is chosen.  Then each iteration starts the
collective, computes, and waits for the collective.  The amount of computation is fixed, not its duration: a library
that takes processor time from the computation prolongs it, which reduces the measured overlap.
"""

from __future__ import annotations

import time

import torch

from farandole.bench.collectives.implementations import Implementation
from farandole.bench.collectives.measure import Buffers, Case, Row, take_turns, values_of_all_ranks


class Work:
    """A computation of small matrix products; `count_for` returns how many an idle core computes in a given time."""

    WIDTH = 48  # a product takes microseconds, so the time of short collectives can be matched
    TRIES = 200

    def __init__(self) -> None:
        self._a, self._b = torch.rand(self.WIDTH, self.WIDTH), torch.rand(self.WIDTH, self.WIDTH)
        self._c = torch.empty(self.WIDTH, self.WIDTH)
        self.run(self.TRIES)
        begun = time.perf_counter()
        self.run(self.TRIES)
        self._each_s = (time.perf_counter() - begun) / self.TRIES

    def count_for(self, seconds: float) -> int:
        """Return the number of matrix products that take `seconds` seconds."""
        return max(1, round(seconds / self._each_s))

    def run(self, count: int) -> None:
        """Compute the products."""
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._c)


class Overlap:
    """Times one operation of one implementation, with and without computation between start and wait."""

    def __init__(self, implementation: Implementation, case: Case, work: Work) -> None:
        self.implementation = implementation
        self._comm = case.comm
        self._work = work
        self._buffers = Buffers(implementation, case)
        self._begin = implementation.begin(
            case.operation, case.setup.reduction, self._buffers.input, self._buffers.output
        )
        self._count = 0
        self.pure_s = self.compute_s = self.overall_s = 0.0

    def warm_up(self, iterations: int) -> None:
        """Choose an amount of computation that takes as long as the communication, averaged over the ranks."""
        tries = max(1, iterations)
        self._pure(tries)
        self._count = self._work.count_for(float(values_of_all_ranks(self.pure_s / tries, self._comm).mean()))
        self.pure_s = 0.0

    def run(self, iterations: int) -> None:
        """Time communication, computation and both together, `iterations` times each."""
        self._pure(iterations)
        clock, meet = time.perf_counter, self._comm.barrier
        for _ in range(iterations):
            begun = clock()
            self._work.run(self._count)
            self.compute_s += clock() - begun
            meet()
        for _ in range(iterations):
            begun = clock()
            wait = self._begin()
            self._work.run(self._count)
            wait()
            self.overall_s += clock() - begun
            meet()

    def _pure(self, iterations: int) -> None:
        for _ in range(iterations):
            begun = time.perf_counter()
            self._begin()()
            self.pure_s += time.perf_counter() - begun
            self._comm.barrier()


def measure_overlap(implementations: list[Implementation], case: Case) -> list[Row]:
    """Return the overlap of each implementation in percent, averaged over the ranks."""
    iterations, warmup = case.counts
    work = Work()
    trials = [Overlap(implementation, case, work) for implementation in implementations]
    for trial in trials:
        trial.warm_up(warmup)
    take_turns([trial.run for trial in trials], iterations, case.comm)
    rows = []
    for trial in trials:
        overall, compute, pure = (
            float(values_of_all_ranks(seconds, case.comm).mean()) / iterations * 1e6
            for seconds in (trial.overall_s, trial.compute_s, trial.pure_s)
        )
        figures = {"overall_us": overall, "compute_us": compute, "pure_us": pure}
        rows.append(case.row(trial.implementation, **figures, overlap=hidden(overall, compute, pure)))
    return rows


def hidden(overall: float, compute: float, pure: float) -> float:
    """Return the percentage of the pure communication time that the computation hides."""
    return max(0.0, 100 - 100 * (overall - compute) / pure)
