"""Compare the step time and memory of a GPT with Farandole, DeepSpeed, FSDP2 and DDP, for several ZeRO stages.

    python -m benchmarks.zero [--model 10M] [--precision fp32] [--ranks 2] [--deepspeed PYTHON]

Each rank has one thread, pinned to its own core.  All implementations use AdamW and the same initial weights and
batch.  Each implementation runs in separate processes, because DeepSpeed needs its own environment:

    python -m venv /tmp/deepspeed && . /tmp/deepspeed/bin/activate
    pip install torch==2.13.0
    pip install numpy setuptools wheel ninja && DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed

The processes of all implementations of a stage exist at the same time and alternate; waiting processes sleep.  The
limit is `no communication`, in which each rank trains alone.  Before the measurement, the losses of the first steps are
compared with the losses of a single process that trains on the full batch.

Memory is measured in separate steps.  The benchmark reports the memory of all ranks without libraries, counting shared
memory once, and the tensor memory of one rank, including its share of shared weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import arguments, human_seconds, markdown_table, save
from benchmarks.picture import draw_zero
from benchmarks.process_set import ProcessSet
from benchmarks.resident import PeakOf, available_bytes, data_bytes, peak_resident_bytes
from benchmarks.zero_implementations import Setting
from farandole.models.gpt import GPTConfig

MODELS = {
    "tiny": (GPTConfig(vocabulary=512, context=32, layers=2, heads=2, width=64), 4),
    "10M": (GPTConfig(vocabulary=4096, context=256, layers=5, heads=6, width=384), 4),
    "124M": (GPTConfig(vocabulary=50304, context=256, layers=12, heads=12, width=768), 2),
}
"""For each model: its configuration, and the number of samples per step and pair of ranks."""
LIMIT = "no communication"
YARDSTICK = Setting("alone", 0, "fp32", backend="")
STAGES: dict[int, dict[str, Setting]] = {
    0: {
        "DDP over farandole": Setting("DDP", 0, "fp32", backend="farandole"),
        "Farandole": Setting("Farandole", 0, "fp32", backend="farandole"),
    },
    2: {
        "DeepSpeed": Setting("DeepSpeed", 2, "fp32"),
        "FSDP2": Setting("FSDP2", 2, "fp32"),
        "Farandole": Setting("Farandole", 2, "fp32", backend="farandole"),
    },
    3: {
        "DeepSpeed": Setting("DeepSpeed", 3, "fp32"),
        "FSDP2": Setting("FSDP2", 3, "fp32"),
        "Farandole": Setting("Farandole", 3, "fp32", backend="farandole"),
    },
}
CLOSE = {"fp32": 1e-4, "bf16": 3e-2}
"""The largest allowed difference in nats between a loss and the loss of a single process in fp32."""
LEARNT = 0.1
"""The smallest decrease of the loss, in nats, for which a comparison of losses is meaningful."""
BYTES_PER_PARAMETER = 20
"""The number of bytes of a weight, its gradient and two moments in fp32, plus 25 %."""


class DisagreementError(RuntimeError):
    """Raised if an implementation's losses differ from the reference losses."""


class Benchmark:
    """The measurements for one model in one precision."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.config, per_two = MODELS[options.model]
        self.samples = per_two * options.ranks // 2
        self.reference: list[float] = []

    def process_set(self, setting: Setting, ranks: int) -> ProcessSet:
        """Start the ranks of an implementation."""
        order = {
            "setting": asdict(setting),
            "model": asdict(self.config),
            "samples": self.samples,
            "keep_freed_memory": not self.options.default_allocator,
        }
        python = self.options.deepspeed if setting.implementation == "DeepSpeed" else sys.executable
        return ProcessSet("benchmarks.zero_rank", order, ranks, python, not self.options.no_pin)

    def refer(self) -> None:
        """Compute the reference losses: one process trains on the full batch in fp32."""
        with self.process_set(YARDSTICK, 1) as process_set:
            process_set.ready()
            process_set.ask("build")
            self.reference = process_set.ask(f"steps {self.options.checked}")[0]["losses"]
        if not self.reference[-1] <= self.reference[0] - LEARNT:
            raise DisagreementError(
                f"expected the reference loss to fall by at least {LEARNT}, got {self.reference}; increase --checked"
            )

    def stage(self, implementations: dict[str, Setting]) -> dict[str, dict[str, Any]]:
        """Measure implementations in alternating turns, and return their figures by name."""
        needed = BYTES_PER_PARAMETER * self.config.parameters * self.options.ranks * len(implementations)
        if needed > available_bytes():
            raise MemoryError(
                f"{len(implementations)} implementations with {self.config.parameters:,} parameters on "
                f"{self.options.ranks} ranks need {needed >> 20} MiB, but {available_bytes() >> 20} MiB are available; "
                f"use a smaller --model or fewer --ranks"
            )
        with ExitStack() as stack:
            started = {
                name: stack.enter_context(self.process_set(setting, self.options.ranks))
                for name, setting in implementations.items()
            }
            if not self.reference:
                self.refer()  # while the other processes load their libraries
            process_sets: dict[str, ProcessSet] = {}
            for name, process_set in started.items():
                lacking = process_set.ready()[0].get("missing")
                if lacking:
                    print(f"{name} is not measured: {lacking}")
                else:
                    process_sets[name] = process_set
            figures = {
                name: self.first_steps(name, process_set) for name, process_set in process_sets.items()
            }
            for name, times in self.times(process_sets).items():
                figures[name] |= times
            for name, process_set in process_sets.items():
                figures[name] |= memory_of(process_set)
        return figures

    def first_steps(self, name: str, process_set: ProcessSet) -> dict[str, Any]:
        """Build the model of an implementation, and run the steps whose losses are compared."""
        before = sum(data_bytes(pid) for pid in process_set.pids)
        process_set.ask("build")
        answers = process_set.ask(f"steps {self.options.checked}")
        losses = [statistics.mean(ranks) for ranks in zip(*(a["losses"] for a in answers), strict=True)]
        if name != LIMIT:
            self.compare(name, losses)
        return {"losses": losses, "before_bytes": before}

    def times(self, process_sets: dict[str, ProcessSet]) -> dict[str, dict[str, float]]:
        """Alternate the implementations, and return the median, fastest and slowest seconds per step."""
        seconds: dict[str, list[float]] = {name: [] for name in process_sets}
        busy: dict[str, list[float]] = {name: [] for name in process_sets}
        for _ in range(self.options.turns):
            for name, process_set in process_sets.items():
                answers = process_set.ask(f"steps {self.options.steps}")
                seconds[name].append(max(answer["seconds"] for answer in answers))
                busy[name].append(statistics.mean(answer["processor_seconds"] for answer in answers))
        limit = statistics.median(seconds[LIMIT])
        return {
            name: {
                "seconds": statistics.median(samples),
                "fastest_seconds": min(samples),
                "slowest_seconds": max(samples),
                "processor_seconds": statistics.median(busy[name]),
                "limit_seconds": limit,
            }
            for name, samples in seconds.items()
        }

    def compare(self, name: str, losses: list[float]) -> None:
        """Raise DisagreementError if the losses differ from the reference losses."""
        close = CLOSE[self.options.precision]
        if not all(abs(loss - wanted) <= close for loss, wanted in zip(losses, self.reference, strict=True)):
            raise DisagreementError(
                f"{name}: expected the losses of a single process, {self.reference}, up to a difference of {close}, "
                f"got {losses}; check the settings of {name}"
            )

    def run(self) -> dict[str, Any]:
        """Measure every stage."""
        implementations = []
        for stage in self.options.stages:
            only = self.options.only
            settings = {name: s for name, s in STAGES[stage].items() if not only or name in only}
            settings = {LIMIT: YARDSTICK} | settings | variants(stage, self.options.variant)
            settings = {
                name: replace(setting, precision=self.options.precision) for name, setting in settings.items()
            }
            for name, figures in self.stage(settings).items():
                implementations.append({"name": name, "stage": stage} | figures)
        return {
            "model": self.options.model,
            "parameters": self.config.parameters,
            "tokens_per_step": self.samples * self.config.context,
            "precision": self.options.precision,
            "ranks": self.options.ranks,
            "reference_losses": self.reference,
            "implementations": implementations,
        }


def memory_of(process_set: ProcessSet) -> dict[str, int]:
    """Return the peak memory of all ranks during a step, and the tensor memory of rank 0, in bytes."""
    with PeakOf(process_set.pids) as memory:
        process_set.ask("steps 2")
    resident = sum(peak_resident_bytes(pid) for pid in process_set.pids)
    tensors = process_set.ask("track")[0]
    return {
        "data_bytes": memory.peak,
        "resident_bytes": resident,
        "tensor_bytes": tensors["peak"],
        "kept_bytes": tensors["between_steps"],
    }


def variants(stage: int, given: list[list[str]]) -> dict[str, Setting]:
    """Return the settings given by `--variant` for a stage, by name."""
    settings = {}
    for implementation, of_stage, options in given:
        if int(of_stage) == stage:
            chosen = json.loads(options)
            backend = chosen.pop("backend", "farandole" if implementation == "Farandole" else "gloo")
            settings[f"{implementation} {options}"] = Setting(implementation, stage, "fp32", backend, chosen)
    return settings


def table(result: dict[str, Any]) -> str:
    """Return a table with one row per implementation: step time, ratio to the limit of the same run, and memory."""
    rows = []
    for figures in result["implementations"]:
        if figures["name"] == LIMIT and figures["stage"] != result["implementations"][0]["stage"]:
            continue
        rows.append(
            [
                "-" if figures["name"] == LIMIT else str(figures["stage"]),
                figures["name"],
                human_seconds(figures["seconds"]),
                f"{figures['seconds'] / figures['limit_seconds']:.2f}",
                human_seconds(figures["processor_seconds"]),
                mebibytes(figures["data_bytes"]),
                mebibytes(figures["data_bytes"] - figures["before_bytes"]),
                mebibytes(figures["tensor_bytes"]),
                mebibytes(figures["kept_bytes"]),
            ]
        )
    head = [
        "stage",
        f"{result['model']}, {result['precision']}, {result['ranks']} ranks",
        "step",
        "x no communication",
        "processor, per rank",
        "memory, all ranks",
        "training only",
        "tensors of a rank",
        "between steps",
    ]
    return markdown_table(head, rows)


def mebibytes(count: int) -> str:
    """Format a number of bytes, such as `1,234 MiB`."""
    return f"{count / (1 << 20):,.0f} MiB"


def main() -> None:
    """Run the benchmark from the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="10M", help="number of parameters (default 10M)")
    parser.add_argument(
        "--precision", choices=CLOSE, default="fp32", help="precision of the weights (default fp32)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument("--turns", type=int, default=7, help="turns per implementation (default 7)")
    parser.add_argument("--steps", type=int, default=2, help="steps per turn (default 2)")
    parser.add_argument("--checked", type=int, default=6, help="steps whose losses are compared (default 6)")
    parser.add_argument(
        "--stages",
        type=int,
        nargs="+",
        choices=STAGES,
        default=list(STAGES),
        help="measure only these stages; do not save the results",
    )
    names = sorted({name for implementations in STAGES.values() for name in implementations})
    parser.add_argument(
        "--only", nargs="*", choices=names, help="measure only these implementations; do not save the results"
    )
    parser.add_argument(
        "--variant",
        nargs=3,
        action="append",
        default=[],
        metavar=("IMPLEMENTATION", "STAGE", "OPTIONS"),
        help='also measure other settings, such as DeepSpeed 2 \'{"adam": "cpu"}\'; do not save the results',
    )
    parser.add_argument(
        "--deepspeed", default="/tmp/deepspeed/bin/python", help="Python interpreter with DeepSpeed"
    )
    parser.add_argument(
        "--no-pin", action="store_true", help="do not pin ranks to cores; do not save the results"
    )
    parser.add_argument(
        "--default-allocator",
        action="store_true",
        help="use glibc's default settings for freed memory; do not save the results",
    )
    options = parser.parse_args()
    if (not options.only or "DeepSpeed" in options.only) and not Path(options.deepspeed).exists():
        parser.error(
            f"--deepspeed: {options.deepspeed} does not exist; --help explains how to create the environment"
        )
    result = Benchmark(options).run()
    print(table(result))
    tried = options.only or options.variant or options.no_pin or options.default_allocator
    if options.stages == list(STAGES) and not tried:
        path = save(f"zero-{options.model}-{options.precision}-{options.ranks}", result)
        draw_zero(result, path.with_suffix(".png"))
        print(f"\nresults written to {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
