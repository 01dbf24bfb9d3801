"""How much of a collective goes on while this rank computes.

Pure communication is timed first, and a computation made as long.  Then the collective is begun, the computation done,
and the collective waited for.  The computation is so much work, not so much time: a library that takes its
processor time from the computation makes that longer, and has hidden nothing.
"""

from __future__ import annotations

import time

import torch

from farandole.bench.collectives_contenders import Contender
from farandole.bench.collectives_measure import Buffers, Case, Row, everyones, take_turns


class Work:
    """Products of small matrices, as many as a given time takes when nothing else goes on."""

    WIDTH = 48  # a product takes microseconds, so that short collectives have their measure too
    TRIES = 200

    def __init__(self) -> None:
        self._a, self._b = torch.rand(self.WIDTH, self.WIDTH), torch.rand(self.WIDTH, self.WIDTH)
        self._c = torch.empty(self.WIDTH, self.WIDTH)
        self.run(self.TRIES)
        begun = time.perf_counter()
        self.run(self.TRIES)
        self._each_s = (time.perf_counter() - begun) / self.TRIES

    def count_for(self, seconds: float) -> int:
        """How many products take so long."""
        return max(1, round(seconds / self._each_s))

    def run(self, count: int) -> None:
        """Compute."""
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._c)


class Overlap:
    """One contender at one operation and size: begun and waited for, with and without work in between."""

    def __init__(self, contender: Contender, case: Case, work: Work) -> None:
        self.contender = contender
        self._comm = case.comm
        self._work = work
        self._buffers = Buffers(contender, case)
        self._begin = contender.begin(
            case.operation, case.setup.reduction, self._buffers.input, self._buffers.output
        )
        self._count = 0
        self.pure_s = self.compute_s = self.overall_s = 0.0

    def warm_up(self, iterations: int) -> None:
        """Find out how much work is as long as the communication, on average over the ranks."""
        tries = max(1, iterations)
        self._pure(tries)
        self._count = self._work.count_for(float(everyones(self.pure_s / tries, self._comm).mean()))
        self.pure_s = 0.0

    def run(self, iterations: int) -> None:
        """Measure communication, computation, and both, each so many times."""
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


def measure_overlap(contenders: list[Contender], case: Case) -> list[Row]:
    """What of each contender's communication is hidden, on average over the ranks."""
    iterations, warmup = case.counts
    work = Work()
    trials = [Overlap(contender, case, work) for contender in contenders]
    for trial in trials:
        trial.warm_up(warmup)
    take_turns([trial.run for trial in trials], iterations, case.comm)
    rows = []
    for trial in trials:
        overall, compute, pure = (
            float(everyones(seconds, case.comm).mean()) / iterations * 1e6
            for seconds in (trial.overall_s, trial.compute_s, trial.pure_s)
        )
        figures = {"overall_us": overall, "compute_us": compute, "pure_us": pure}
        rows.append(case.row(trial.contender, **figures, overlap=hidden(overall, compute, pure)))
    return rows


def hidden(overall: float, compute: float, pure: float) -> float:
    """The share, in percent, of the pure communication that took no time of its own."""
    return max(0.0, 100 - 100 * (overall - compute) / pure)
