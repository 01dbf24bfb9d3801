"""Predict the speed of serving a model (`farandole plan --serve`), and compare the predictions with measurements.

The speed is predicted for each combination of precision, number of tensor-parallel ranks and number of running
sequences.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from farandole.bench.accelerators import described
from farandole.bench.options import BenchError
from farandole.bench.planning import CONTEXT_BYTES, PlanSetup, accelerator_named, run_words
from farandole.bench.ranks import result_of_ranks
from farandole.bench.serving.plan_check import Measured, ServingCheckJobSpec
from farandole.bench.serving.speeds import PRECISIONS, speeds
from farandole.data.wording import counted
from farandole.launch.control_groups import available_memory
from farandole.models.sequence import Transformer
from farandole.plan import PlanError
from farandole.planner.serving import (
    Mix,
    ServedPart,
    ServingEstimate,
    ServingMachine,
    estimate_serving,
    running_choices,
)
from farandole.train.config import load_config
from farandole.train.start import read_request
from farandole.train.workload import workload_of

MOST_RUNNING = 256
"""The largest number of running sequences to consider by default."""


@dataclass(frozen=True)
class ServingPlanSetup:
    """Options of `farandole plan --serve`.

    If `memory`, `flops`, `memory_bandwidth` or `bandwidth` is None, the published value of the accelerator is used;
    without an accelerator, the value is measured on this machine.

    Args:
        words: the arguments that describe the model, as for a training run.
        mix: the lengths of the prompts and outputs.
        ranks: the number of ranks.
        memory: the memory per rank in bytes.
        flops: the FLOP/s of a rank.
        memory_bandwidth: the bandwidth of a rank's memory in bytes per second.
        bandwidth: the bandwidth between ranks in bytes per second, per rank.
        tensor: the numbers of tensor-parallel ranks to consider; if empty, they are chosen automatically.
        precision: the precisions to consider; if empty, one is chosen automatically.
        running: the numbers of running sequences to consider; if empty, they are chosen automatically.
        accelerators: the name of an accelerator, or None to predict for this machine.
        remeasure: whether to measure the speeds of this machine even if the cache contains them.
    """

    words: tuple[str, ...]
    mix: Mix
    ranks: int = 1
    memory: int | None = None
    flops: float | None = None
    memory_bandwidth: float | None = None
    bandwidth: float | None = None
    tensor: Sequence[int] = ()
    precision: Sequence[str] = ()
    running: Sequence[int] = ()
    accelerators: str | None = None
    remeasure: bool = False


@dataclass(frozen=True)
class ServingPlan:
    """The predictions for all combinations of the choices in `setup`, and the machine for which they were made."""

    setup: ServingPlanSetup
    machine: ServingMachine
    estimates: list[ServingEstimate]

    def replicas(self, estimate: ServingEstimate) -> int:
        """Return the number of model replicas on all ranks, for the tensor-parallel size of `estimate`."""
        return self.setup.ranks // estimate.part.tensor


def plan_serving(setup: ServingPlanSetup) -> ServingPlan:
    """Predict the speed for each combination of the choices in `setup`.

    Raises:
        ConfigError, PlanError, BenchError: if options are invalid.
    """
    for name in setup.precision:
        if name not in PRECISIONS:
            raise BenchError(f"--precision {name}: expected one of {', '.join(PRECISIONS)} with --serve")
    model = _model(setup.words)
    machine = _machine(setup)
    precisions = setup.precision or (["bf16"] if setup.accelerators else ["fp32"])
    found: list[ServingEstimate] = []
    refusal: PlanError | None = None
    for precision in precisions:
        for tensor in setup.tensor or [n for n in (1, 2, 4, 8) if setup.ranks % n == 0]:
            if setup.ranks % tensor:
                raise BenchError(
                    f"--tensor {tensor} is not a divisor of --ranks {setup.ranks}; change one of them"
                )
            try:
                part = ServedPart.of(model, tensor, precision)
            except PlanError as error:
                refusal = error
                continue
            fits = estimate_serving(part, machine, setup.mix, 1).fits
            for running in setup.running or running_choices(max(1, min(fits, MOST_RUNNING))):
                found.append(estimate_serving(part, machine, setup.mix, running))
    if not found and refusal is not None:
        raise refusal
    return ServingPlan(setup, machine, found)


def _model(words: Sequence[str]) -> Transformer:
    request = read_request(run_words(PlanSetup(tuple(words))), resume=False)
    config = load_config(request.source, request.overrides)
    model = workload_of(config, 1).model
    if config.task not in ("text", "sft") or not isinstance(model, Transformer):
        raise BenchError(
            f"--serve: expected a model that generates text (task='text' or 'sft'), got task={config.task!r}; choose "
            "another model or task"
        )
    return model


def _machine(setup: ServingPlanSetup) -> ServingMachine:
    if setup.accelerators is None:
        if torch.cuda.is_available():
            raise BenchError(
                "--serve can measure only hosts without accelerators, but this host has CUDA devices; specify the "
                "devices with --accelerators"
            )
        if given := [
            name for name in ("flops", "memory_bandwidth", "bandwidth") if getattr(setup, name) is not None
        ]:
            raise BenchError(f"with --serve, --{given[0].replace('_', '-')} requires --accelerators")
        measured = speeds(setup.ranks, remeasure=setup.remeasure)
        return measured.machine(setup.memory or available_memory() // setup.ranks)
    published = accelerator_named(setup.accelerators)
    return ServingMachine.of_accelerator(
        memory=setup.memory or published.memory,
        flops=published.flops if setup.flops is None else dict.fromkeys(published.flops, setup.flops),
        read=setup.memory_bandwidth or published.stream,
        bandwidth=setup.bandwidth or published.bandwidth,
        process=CONTEXT_BYTES,
    )


def _described(setup: ServingPlanSetup) -> str:
    """Describe in one line which values come from a data sheet, or return "" if no values do."""
    if setup.accelerators is None:
        return ""
    return described(
        accelerator_named(setup.accelerators),
        memory=setup.memory is None,
        flops=setup.flops is None,
        stream=setup.memory_bandwidth is None,
        bandwidth=setup.bandwidth is None and setup.ranks > 1,
        host_bandwidth=False,
    )


def table(plan: ServingPlan) -> Table:
    """Return a table with one row for each prediction."""
    setup = plan.setup
    title = (
        f"{counted(setup.ranks, 'rank')}, prompts of {setup.mix.prompt} tokens, outputs of {setup.mix.output} tokens; "
        f"{plan.machine.memory / (1 << 30):.1f} GiB per rank"
    )
    title += "\n" + published if (published := _described(setup)) else ""
    found = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    for name in (
        "precision",
        "tensor",
        "replicas",
        "weights GiB",
        "KV KiB/token",
        "fit",
        "running",
        "TTFT ms",
        "TPOT ms",
        "tokens/s per rank",
        "tokens/s",
        "requests/s",
    ):
        found.add_column(name, justify="left" if name == "precision" else "right", no_wrap=True)
    for one in plan.estimates:
        replicas = plan.replicas(one)
        total = replicas * one.tokens_per_s
        speed = (
            [
                f"{1e3 * one.ttft:,.3g}",
                f"{1e3 * one.tpot:.3g}",
                f"{total / setup.ranks:,.0f}",
                f"{total:,.0f}",
                f"{replicas * one.requests_per_s:.3g}",
            ]
            if one.running <= one.fits
            else ["does not fit", "", "", "", ""]
        )
        found.add_row(
            one.part.precision,
            str(one.part.tensor),
            str(replicas),
            f"{one.weight_bytes / (1 << 30):.3g}",
            f"{one.part.kv_bytes / 1024:.3g}",
            f"{one.fits:,}",
            str(one.running),
            *speed,
        )
    return found


def dump(plan: ServingPlan) -> str:
    """Return JSON with the setup, the machine and all predictions."""
    plans = [{**asdict(one), "replicas": plan.replicas(one)} for one in plan.estimates]
    content = {"setup": asdict(plan.setup), "machine": asdict(plan.machine), "plans": plans}
    return json.dumps(content, indent=1, default=str)


def check(plan: ServingPlan) -> list[tuple[ServingEstimate, Measured]]:
    """Serve the model on this machine, and measure its speed for comparison with the predictions.

    The model is served with the precision and the number of tensor-parallel ranks of the first prediction.  The speed
    is measured for each number of running sequences that is in the plan and fits in memory.

    Returns:
        Pairs of a prediction and the corresponding measurement.

    Raises:
        BenchError: if a rank fails, nothing fits in memory, or the plan is for another machine.
    """
    first = plan.estimates[0].part
    alike = [one for one in plan.estimates if one.part == first and one.running <= one.fits]
    if plan.setup.accelerators or not alike:
        raise BenchError(
            "--check measures this machine, but the plans are for --accelerators; omit --check"
            if plan.setup.accelerators
            else "--check requires a plan that fits in memory, but no plan fits; use more ranks or a smaller model"
        )
    words = tuple(run_words(PlanSetup(plan.setup.words)))
    runs = tuple(one.running for one in alike)

    def job_spec(answer: Path) -> str:
        mix = asdict(plan.setup.mix)
        return ServingCheckJobSpec(words, first.tensor, first.precision, mix, runs, str(answer)).dump()

    found = result_of_ranks(
        "farandole.bench.serving.plan_check", job_spec, ranks=plan.setup.ranks, failure="--check failed"
    )
    return [(one, Measured(**each)) for one, each in zip(alike, json.loads(found), strict=True)]


def checked_table(found: Sequence[tuple[ServingEstimate, Measured]], replicas: int) -> Table:
    """Return a table that compares predicted and measured speeds, and shows the relative errors.

    The predicted tokens per second are multiplied by `replicas`, because the measurement includes all replicas.
    """
    result = Table(
        title="predicted / measured (error)", title_justify="left", title_style="", box=None, pad_edge=False
    )
    for name in ("running", "TTFT ms", "TPOT ms", "tokens/s"):
        result.add_column(name, justify="right", no_wrap=True)
    for one, measured in found:
        result.add_row(
            str(one.running),
            _compared(1e3 * one.ttft, 1e3 * measured.ttft),
            _compared(1e3 * one.tpot, 1e3 * measured.tpot),
            _compared(replicas * one.tokens_per_s, measured.tokens_per_s),
        )
    return result


def _compared(predicted: Any, measured: float) -> str:
    return f"{predicted:,.3g} / {measured:,.3g} ({predicted / measured - 1:+.0%})"
