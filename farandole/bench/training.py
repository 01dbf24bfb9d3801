"""The synthetic training benchmark: ResNet throughput in images per second, and the scaling efficiency.

`farandole launch` starts `python -m farandole.bench.training SETUP`; under another launcher every rank calls `run`.

A barrier precedes each measurement.  The parallel run is called *together*.  A scaling efficiency is the throughput of
the parallel run divided by the throughput of the same training without communication, in one of two runs:

- *apart*: all ranks train at the same time, without communication.  They share caches, memory bandwidth and clock
  frequency as in the parallel run, so this ratio shows the cost of communication alone.
- *alone*: only rank 0 trains, on the same cores as in the parallel run, while the other ranks sleep.  This ratio
  also includes the slowdown of a fully loaded machine.

The throughput of *apart* is the mean over the ranks.  The throughput of the other runs is computed from the time of
the slowest rank.  The runs are interleaved, because times measured minutes apart on a shared machine are not
comparable.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import farandole
from farandole.bench.frameworks import Training, find_framework
from farandole.bench.setup import TrainingSetup
from farandole.launch.cores import processor_name
from farandole.launch.runtime import Runtime

TIMEOUT_S = 3600.0
"""The timeout of the job's process group in seconds; a rank may wait this long for a rank that is still computing."""

CONFIDENCE = 1.96
"""95 % of a normal distribution is within this number of standard deviations of the mean."""


@dataclass
class Figures:
    """The throughput per rank in images per second, with one value per iteration."""

    values: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Return the mean over the iterations."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """Return 1.96 standard deviations of the throughput, in images per second."""
        return CONFIDENCE * statistics.pstdev(self.values)


def run(setup: TrainingSetup) -> None:
    """Run the benchmark as one rank of this job; rank 0 prints the report."""
    with farandole.init(timeout_s=TIMEOUT_S) as runtime:
        _Benchmark(setup, runtime).run()


class _Benchmark:
    def __init__(self, setup: TrainingSetup, runtime: Runtime) -> None:
        self.setup = setup
        self.runtime = runtime
        self.framework = find_framework(setup.framework)
        self.figures: dict[str, Figures] = {}

    def run(self) -> None:
        setup, ranks = self.setup, self.runtime.size
        self.say(f"Model: {setup.title}")
        self.say(f"Batch size: {setup.micro_batch}")
        self.say(f"Number of ranks: {ranks}")
        trainings = self.trainings()
        implementations = self.implementations(trainings)
        self.figures = {name: Figures() for name in implementations}
        self.say("Running warmup...")
        for implementation in implementations.values():
            self.runtime.comm.barrier()
            implementation(setup.num_warmup_batches)
        self.say("Running benchmark...")
        for number in range(setup.num_iters):
            for name, implementation in implementations.items():
                self.figures[name].values.append(self.measure(name, implementation))
            self.say(f"Iter #{number}: {self.figures['together'].values[-1]:.1f} img/sec per rank")
        for training in trainings.values():
            training.close()
        self.report()

    def trainings(self) -> dict[str, Training]:
        build = self.framework.build
        trainings = {"together": build(self.setup, self.runtime, self.setup.implementation)}
        if self.setup.efficiency:
            trainings["apart"] = build(self.setup, self.runtime, "alone")
        return trainings

    def implementations(self, trainings: dict[str, Training]) -> dict[str, Callable[[int], None]]:
        """Return a dict that maps the name of each run to a function that trains for n steps."""

        def steps(training: Training) -> Callable[[int], None]:
            def many(count: int) -> None:
                for _ in range(count):
                    training.step()
                training.finish()

            return many

        implementations = {name: steps(training) for name, training in trainings.items()}
        if self.setup.efficiency:
            implementations["alone"] = implementations["apart"] if self.runtime.rank == 0 else lambda _: None
        return implementations

    def measure(self, name: str, implementation: Callable[[int], None]) -> float:
        """Measure one iteration, and return the images per second per rank.  This is a collective call."""
        comm = self.runtime.comm
        comm.barrier()
        started = time.perf_counter()
        implementation(self.setup.num_batches_per_iter)
        seconds = time.perf_counter() - started
        images = self.setup.micro_batch * self.setup.num_batches_per_iter
        if name == "apart":  # no rank waits for another, so the mean over ranks counts
            speed = torch.tensor([images / seconds], dtype=torch.float64)
            comm.all_reduce(speed, "avg")
            return float(speed)
        slowest = torch.tensor([seconds], dtype=torch.float64)
        comm.all_reduce(slowest, "max")
        return images / float(slowest)

    def report(self) -> None:
        ranks, together = self.runtime.size, self.figures["together"]
        self.say(f"Img/sec per rank: {together.mean:.1f} +-{together.spread:.1f}")
        self.say(
            f"Total img/sec on {ranks} rank(s): {ranks * together.mean:.1f} +-{ranks * together.spread:.1f}"
        )
        if self.setup.efficiency:
            apart, alone = self.figures["apart"].mean, self.figures["alone"].mean
            self.say(
                f"Scaling efficiency on {ranks} rank(s): {together.mean / apart:.1%} of ranks that do not "
                f"communicate ({apart:.1f} img/sec each), {together.mean / alone:.1%} of one rank alone ({alone:.1f})"
            )
        if self.setup.json is not None and self.runtime.rank == 0:
            Path(self.setup.json).write_text(json.dumps(self.result(), indent=1) + "\n")

    def result(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        ranks, means = self.runtime.size, {name: figures.mean for name, figures in self.figures.items()}
        result: dict[str, Any] = {
            "machine": machine(),
            "launcher": self.runtime.launcher,
            "device": str(self.runtime.device),
            "threads_per_rank": torch.get_num_threads(),
            "ranks": ranks,
            "setup": {key: value for key, value in asdict(self.setup).items() if key != "json"},
            "images_per_second_per_rank": {name: figures.values for name, figures in self.figures.items()},
            "mean": means["together"],
            "spread": self.figures["together"].spread,
            "total": ranks * means["together"],
        }
        if self.setup.efficiency:
            result["efficiency"] = {name: means["together"] / means[name] for name in ("apart", "alone")}
        return result

    def say(self, line: str) -> None:
        if self.runtime.rank == 0:
            print(line, flush=True)


def machine() -> dict[str, Any]:
    """Return a description of this machine: processor, cores, software versions and date."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "farandole": farandole.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    run(TrainingSetup.load(sys.argv[1]))
