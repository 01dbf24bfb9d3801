"""Measure how much of a collective overlaps with computation.

First, the collective is timed alone, and an equally long computation is chosen.  Then each iteration starts the
collective, computes, and waits for the collective.  Every iteration computes the same number of matrix products.  If
the library takes processor time from the computation, the computation takes longer, and the measured overlap is
smaller.
"""

from __future__ import annotations

import time

import torch

from farandole.bench.collectives.implementations import Implementation
from farandole.bench.collectives.measure import Buffers, Case, Row, take_turns, values_of_all_ranks


class Work:
    """A computation that consists of small matrix products; the constructor measures the time of one product."""

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
        """Compute `count` matrix products."""
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._c)


class Overlap:
    """Times one operation of one implementation, with and without overlapping computation."""

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
        """Time the operation alone, and choose a computation that takes equally long."""
        tries = max(1, iterations)
        self._pure(tries)
        self._count = self._work.count_for(float(values_of_all_ranks(self.pure_s / tries, self._comm).mean()))
        self.pure_s = 0.0

    def run(self, iterations: int) -> None:
        """Time the communication alone, the computation alone, and both together, each `iterations` times."""
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
    """Measure `case` with each implementation, and return one row per implementation.

    The row contains the overlap in percent and the times in microseconds, all averaged over the ranks.
    """
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
    """Return the percentage of the communication time that the computation hides.

    Args:
        overall: the time of the communication and the computation together.
        compute: the time of the computation alone.
        pure: the time of the communication alone, in the same unit.
    """
    return max(0.0, 100 - 100 * (overall - compute) / pure)
