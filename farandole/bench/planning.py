"""`farandole plan`: from the words of a command to estimates, and to what ranks saw of one of them."""

from __future__ import annotations

import difflib
import itertools
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from farandole.bench.machine import speeds
from farandole.bench.plan_check import Order
from farandole.bench.setup import BenchError
from farandole.launch.control_groups import available_memory
from farandole.launch.local import launch
from farandole.memory.estimate import Estimate, Machine, Workload, estimate_workload, plan_candidates
from farandole.memory.offload_store import measure_bandwidth
from farandole.plan import Plan, Precision, Recompute
from farandole.train.config import TrainConfig, load_config
from farandole.train.memory import workload_of
from farandole.train.precision import bf16_unit
from farandole.train.start import read_request

_PRECISIONS = tuple(precision for precision in get_args(Precision) if precision != "fp8")

_CHECKED_PASSES = 2
"""Micro-batches of a step that `--check` does: more add time and no memory."""

_FLOPS_PER_BYTE = 200
"""Of accelerators that are not here: an A100 does 156 (312 TFLOP/s, 2 TB/s), an H100 295 (by their data sheets)."""

_CONTEXT_BYTES = 600 << 20
"""What a process takes of an accelerator before it has a tensor there, about; it depends on kernels that are loaded."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(iB|B)?(?:/s)?", re.IGNORECASE)


@dataclass(frozen=True)
class PlanSetup:
    """What is asked: the run, the machine, and which plans.

    `memory` bytes for each rank, `flops` and `bandwidth` of each; None for what this machine has.  With `accelerators` it is
    such that are meant, and all three are given.  Of `zero`, `recompute`, `offload` and `precision` every combination is a plan;
    empty ones mean all that make sense.
    """

    words: tuple[str, ...]
    ranks: int
    hosts: int = 1
    memory: int | None = None
    flops: float | None = None
    bandwidth: float | None = None
    zero: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    accelerators: bool = False
    anew: bool = False


@dataclass(frozen=True)
class Planned:
    """The answer: plans, the best first, and what they were estimated for."""

    config: TrainConfig
    workload: Workload
    machine: Machine
    ranks: int
    estimates: list[Estimate]


def plan(setup: PlanSetup) -> Planned:
    """Estimate every plan that is asked for.  Raises `ConfigError`, `PlanError` or `BenchError` for what cannot be."""
    zero, recompute, offload = list(setup.zero), list(setup.recompute), list(setup.offload)
    request = read_request(setup.words, resume=False)
    config = load_config(request.source, request.overrides)
    named = {word.partition("=")[0].strip() for word in request.overrides}
    if "plan.zero" in named:
        zero = zero or [config.plan.zero]
    if "plan.recompute" in named:
        recompute = recompute or [config.plan.recompute]
    if "plan.offload" in named:
        offload = offload or [config.plan.offload]
    if config.plan.swap != "none":
        raise BenchError(
            f"plan.swap={config.plan.swap}: what activations take that are swapped depends on how fast they are "
            f"copied, which is not predicted; plan without it"
        )
    if config.plan.compression != "none":
        zero = zero or [0]
    _check("--zero", [str(stage) for stage in zero], [str(stage) for stage in range(4)])
    recomputations = [mode for mode in get_args(Recompute) if mode != "auto"]
    _check("--recompute", recompute, recomputations)
    _check("--precision", setup.precision, _PRECISIONS)
    if setup.hosts > 1 and (setup.ranks % setup.hosts or setup.bandwidth is None):
        raise BenchError(
            f"--hosts {setup.hosts}: --ranks are a multiple of it, and --bandwidth of the link between hosts is given"
        )
    workload = workload_of(config, setup.ranks)
    machine = _machine(setup)
    axes = [
        zero or list(range(4)),
        recompute or recomputations,
        offload or ["none"],
        list(setup.precision) or [_precision(config, machine)],
    ]
    machine, estimates = _estimates(workload, setup.ranks, machine, axes)
    if not offload and not any(one.fits(machine.memory) for one in estimates):
        axes[2] = ["none", "disk:."] if machine.host else ["none", "host", "disk:."]
        machine, estimates = _estimates(workload, setup.ranks, machine, axes)
    return Planned(config, workload, machine, setup.ranks, estimates)


def check(planned: Planned, steps: int) -> tuple[Estimate, list[dict[str, float]]]:
    """Train `steps` steps as the first plan says: what is predicted of them, and what each rank saw (`Seen`).

    Raises `BenchError` where the ranks failed, or cannot do this plan.
    """
    first = planned.estimates[0].plan
    if planned.machine.host == torch.cuda.is_available():
        raise BenchError(
            "--check runs on the ranks of this machine, and the plans are for another kind of device"
        )
    if not planned.estimates[0].fits(planned.machine.memory):
        raise BenchError("--check: no plan fits, so nothing is started")
    count, samples = planned.config.micro_batches(planned.ranks)
    passes = min(count, _CHECKED_PASSES)
    values = {"batch": passes * samples * planned.ranks, "micro_batch": samples}
    chosen = {"zero": first.zero, "recompute": first.recompute, "offload": first.offload}
    section = planned.config.plan.model_copy(update=chosen)
    config = planned.config.model_copy(update={**values, "plan": section})
    workload = replace(planned.workload, micro_batches=passes, checkpoints=False)
    predicted = estimate_workload(workload, first, planned.ranks, planned.machine)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "seen.json")
        order = Order(config, first.precision, steps, answer)
        status = launch("farandole.bench.plan_check", [order.dump()], ranks=planned.ranks, module=True)
        if status:
            raise BenchError(f"--check: a rank ended with status {status}")
        return predicted, json.loads(answer.read_text())


def dump(planned: Planned) -> str:
    """As JSON: the machine, and for each plan its parts and seconds."""
    plans = [
        {
            **asdict(one),
            "peak": one.peak,
            "seconds": one.seconds,
            "verdict": one.verdict(planned.machine.memory),
        }
        for one in planned.estimates
    ]
    return json.dumps({"ranks": planned.ranks, "machine": asdict(planned.machine), "plans": plans}, indent=1)


def parse_number(option: str, text: str, base: int) -> float:
    """16GiB, 1.5G, 50 G: K, M, G, T and P are powers of `base`.  `BenchError` for anything else."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise BenchError(f"{option} {text!r} is not a number above 0, as in 512M, 16GiB or 1.5G")
    power = " KMGTP".index(match[2].upper() or " ")
    return float(match[1]) * float(base if (match[3] or "").lower() != "ib" else 1024) ** power


def _estimates(
    workload: Workload, ranks: int, machine: Machine, axes: Sequence[Sequence[object]]
) -> tuple[Machine, list[Estimate]]:
    """The estimates of all plans, and the machine with the disk that they mean."""
    plans = [
        Plan(zero=z, recompute=r, offload=o, precision=p)  # type: ignore[arg-type]
        for z, r, o, p in itertools.product(*axes)
    ]
    disks = {one.offload.removeprefix("disk:") for one in plans if one.offload.startswith("disk:")}
    if disks:
        machine = replace(machine, disk=measure_bandwidth(min(disks)))
    return machine, plan_candidates(workload, ranks, machine, plans)


def _machine(setup: PlanSetup) -> Machine:
    """This machine, but for what is given."""
    if setup.accelerators:
        return _accelerated(setup)
    found = speeds(setup.ranks, anew=setup.anew)
    accelerated = torch.cuda.is_available()
    if setup.memory is not None:
        memory = setup.memory
    elif accelerated:
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = available_memory() * setup.hosts // setup.ranks
    flops = found.flops if setup.flops is None else dict.fromkeys(found.flops, setup.flops)
    return Machine(
        memory=memory,
        flops=flops,
        stream=found.stream,
        bandwidth=setup.bandwidth or found.bandwidth,
        process=found.process,
        libraries=0 if accelerated else found.libraries,
        hosts=setup.hosts,
        shared=not accelerated,
        overlap=accelerated,
        host=not accelerated,
    )


def _accelerated(setup: PlanSetup) -> Machine:
    """Accelerators that are not here."""
    if setup.memory is None or setup.flops is None or setup.bandwidth is None:
        raise BenchError(
            "--accelerators: they are not here to be measured; give --memory, --flops and --bandwidth"
        )
    return Machine(
        memory=setup.memory,
        flops=dict.fromkeys(_PRECISIONS, setup.flops),
        stream=setup.flops / _FLOPS_PER_BYTE,
        bandwidth=setup.bandwidth,
        process=_CONTEXT_BYTES,
        libraries=0,
        hosts=setup.hosts,
        shared=False,
        overlap=True,
        host=False,
    )


def _precision(config: TrainConfig, machine: Machine) -> str:
    """What was asked, or what `farandole train` would choose."""
    if config.plan.precision != "auto":
        return config.plan.precision
    if not machine.host:
        return "bf16"
    return "bf16" if bf16_unit(torch.device("cpu")) else "fp32"


def _check(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for one in given:
        if one not in known:
            near = difflib.get_close_matches(one, known, 1)
            hint = f"nearest: {near[0]}" if near else f"one of {', '.join(known)}"
            raise BenchError(f"{option} {one} is not known; {hint}")
