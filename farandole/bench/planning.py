"""Estimate the plans for `farandole plan`, and check one of them by training."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from farandole.bench.accelerators import ACCELERATORS, Accelerator, described
from farandole.bench.machine import Speeds, speeds
from farandole.bench.options import BenchError
from farandole.bench.plan_check import PlanCheckJobSpec
from farandole.bench.ranks import result_of_ranks
from farandole.launch.control_groups import available_memory
from farandole.memory.offload_store import measure_bandwidth
from farandole.models.hf.fields import FolderError
from farandole.models.hf.pretrained import read_config
from farandole.models.moe import Experts
from farandole.parallel.pipeline.schedule import registered
from farandole.plan import Offloaded, Place, Plan, PlanError, Precision, Recompute, Rounding
from farandole.planner import Estimate, Machine, Workload, estimate_ranks
from farandole.planner.search import estimates_of, in_order
from farandole.planner.stage_trace import StageTracer
from farandole.planner.workload import LIBRARY_BYTES, PROCESS_BYTES
from farandole.train.config import ConfigError, TrainConfig, load_config, parse_config
from farandole.train.hardware import bf16_unit
from farandole.train.start import default_ranks, read_request
from farandole.train.workload import model_of, workload_of

_PRECISIONS = tuple(precision for precision in get_args(Precision) if precision != "fp8")

_AXES = ("tensor", "sequence", "context", "expert", "pipeline")
"""The fields of a plan that determine how the model and the samples are split among ranks."""

_FIELDS = (
    *(
        "zero",
        "data_shard",
        "recompute",
        "offload",
        "offloaded",
        "precision",
        "rounding",
        "swap",
        "schedule",
        "stage_bytes",
    ),
    *_AXES,
)
"""The fields of a plan whose values `farandole plan` chooses."""

_KNOWN: dict[str, Sequence[str]] = {
    "zero": [str(stage) for stage in range(4)],
    "recompute": [mode for mode in get_args(Recompute) if mode != "auto"],
    "precision": _PRECISIONS,
    "rounding": get_args(Rounding),
    "offloaded": get_args(Offloaded),
    "schedule": [schedule.name for schedule in registered()],
}

_RESORTS: Sequence[dict[str, Sequence[Any]]] = (
    {"offload": ["none", "disk:."]},
    {"offloaded": get_args(Offloaded), "swap": ["none", "disk:."], "rounding": get_args(Rounding)},
)
_ACCELERATORS_RESORTS: Sequence[dict[str, Sequence[Any]]] = (
    {"offload": ["none", "host", "disk:."]},
    {"offloaded": get_args(Offloaded), "swap": ["none", "host"], "rounding": get_args(Rounding)},
)
"""Additional choices for accelerators: if no plan fits, each dictionary in turn is added to the choices."""

_REFINED = 2
"""The number of meshes for which all kinds of recomputation and all schedules are considered.

To find the best meshes, the meshes are first compared with each other, with block recomputation and the schedule 1F1B
in all plans.
"""

_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half")
"""The schedules to consider by default; the other schedules need more memory for activations or idle longer."""

_MOST_STAGES = 16
"""The largest number of pipeline stages to consider by default, as in the papers on Llama 3 and DeepSeek-V3."""

_LEAST_POSITIONS = 8192
"""The smallest number of positions per rank; by default, context parallelism does not divide a context further."""

_CHECKED_PASSES = 2
"""The maximum number of micro-batches per pipeline stage in a step of `--check`.

More micro-batches would take longer.  With most schedules, they would not need more memory.
"""

_FLOPS_PER_BYTE = 200
"""The assumed ratio of FLOP/s to memory bandwidth in bytes per second, if the user specifies only the FLOP/s.

According to the data sheets, the ratio is 156 for an A100 (312 TFLOP/s, 2 TB/s) and 295 for an H100.
"""

_HOST_FLOPS_PER_BYTE = 12
"""The ratio that corresponds to `_FLOPS_PER_BYTE` for a rank on a CPU host.

On hosts with 2 cores, `farandole.bench.machine` has measured ratios from 6 to 18 in fp32.
"""

CONTEXT_BYTES = 600 << 20
"""The approximate accelerator memory that a process uses before its first tensor.

The exact number depends on the loaded kernels.
"""


@dataclass(frozen=True)
class PlanSetup:
    """Options of `farandole plan`: the run, the machine, and the plans to consider.

    If `memory`, `flops` or `bandwidth` is None, the published value of the accelerator is used; without an accelerator,
    the value is measured on this machine.  If both `flops` and `bandwidth` are given, no speed is measured.

    Args:
        words: the arguments of the training run, as for `farandole train`; hf:FOLDER stands for a Hugging Face model.
        ranks: the number of ranks; if None, `default_ranks` selects it.
        nodes: the number of hosts; by default the result of `Accelerator.hosts`, or 1 without an accelerator.
        memory: the memory per rank in bytes.
        flops: the FLOP/s of a rank.
        bandwidth: the bandwidth between ranks in bytes per second, per rank.
        host_bandwidth: the bandwidth between hosts in bytes per second, per rank; by default `bandwidth`, or the
            published value of the accelerator if `bandwidth` is None too.
        choices: maps fields of `Plan` to the values to consider; every valid combination is a plan.  Other fields have
            default choices.
        accelerators: the name of an accelerator, or None to plan for this machine.
        remeasure: whether to measure the speeds of this machine even if the cache contains them.
    """

    words: tuple[str, ...]
    ranks: int | None = None
    nodes: int | None = None
    memory: int | None = None
    flops: float | None = None
    bandwidth: float | None = None
    host_bandwidth: float | None = None
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    accelerators: str | None = None
    remeasure: bool = False


@dataclass(frozen=True)
class Planned:
    """The estimates of plans, best first, and the machine for which the plans were estimated.

    `published` is a line with the machine's values from data sheets, or "" if there are none.
    """

    config: TrainConfig
    workload: Workload
    machine: Machine
    ranks: int
    estimates: list[Estimate]
    published: str = ""


def plan(setup: PlanSetup) -> Planned:
    """Estimate the memory and the time of the plans to consider.

    Raises:
        ConfigError, PlanError, BenchError: if options are invalid.
    """
    request = read_request(run_words(setup), resume=False)
    config = load_config(request.source, request.overrides)
    ranks = setup.ranks or default_ranks(config)
    accelerator = None if setup.accelerators is None else accelerator_named(setup.accelerators)
    nodes = setup.nodes or (1 if accelerator is None else accelerator.hosts(ranks))
    if ranks % nodes:
        raise BenchError(
            f"--ranks {ranks} is not a multiple of --nodes {nodes}: use the same number of ranks on each node"
        )
    if nodes > 1 and accelerator is None and setup.bandwidth is None:
        raise BenchError(
            f"--nodes {nodes} requires --bandwidth, the bandwidth between hosts in bytes per second"
        )
    choices = _given(setup, config, request.overrides)
    host = accelerator is None and not torch.cuda.is_available()
    axes: dict[str, Sequence[Any]] = {
        "zero": range(4),
        "data_shard": ["all", "host"] if nodes > 1 else ["all"],
        "recompute": [mode for mode in get_args(Recompute) if mode != "auto"],
        "precision": [_precision(config, host=host)],
        "lora": [config.plan.lora()],
        "compression": [config.plan.compression],
    }
    model = model_of(config)
    if not host:
        axes |= _meshes(config, model, ranks, nodes)
    if max(choices.get("pipeline", axes.get("pipeline", [1]))) > 1:
        axes["schedule"] = _SCHEDULES
    _check_batch(config, _candidates(ranks, axes | choices), ranks)
    machine = (
        _this_machine(setup, ranks, nodes) if accelerator is None else _published(setup, accelerator, nodes)
    )
    search = partial(_estimates, config, model, ranks)
    machine, estimates = search(machine, axes | choices)
    for further in _RESORTS if machine.host else _ACCELERATORS_RESORTS:
        if any(one.fits(machine.memory) for one in estimates):
            break
        if further.keys() - choices.keys():
            axes |= further
            machine, others = search(machine, axes | choices, _best_meshes(estimates))
            known = {one.plan for one in others}
            estimates = in_order(
                [*others, *(one for one in estimates if one.plan not in known)], machine.memory
            )
    workload = workload_of(_with(config, estimates[0].plan), ranks, model)
    published = ""
    if accelerator is not None:
        published = described(
            accelerator,
            memory=setup.memory is None,
            flops=setup.flops is None,
            stream=setup.flops is None,
            bandwidth=setup.bandwidth is None,
            host_bandwidth=nodes > 1 and setup.bandwidth is None and setup.host_bandwidth is None,
        )
    return Planned(config, workload, machine, ranks, estimates, published)


def run_words(setup: PlanSetup) -> list[str]:
    """Return the arguments of the training run.

    hf:FOLDER in `setup.words` is replaced by arguments for training the Hugging Face model in this folder.
    """
    words: list[str] = []
    for word in setup.words:
        kind, _, folder = word.partition(":")
        if kind != "hf":
            words.append(word)
            continue
        words += ["pretrain", f"model={folder}", "model.pretrained=false", "data.path=stdlib"]
        if not any(other.startswith("task=") for other in setup.words) and _classifies(folder):
            words.append("task=classify")
        if setup.ranks and not any(other.startswith("batch=") for other in setup.words):
            words += [f"batch={setup.ranks}", "micro_batch=1"]
    return words


def _classifies(folder: str) -> bool:
    """Return whether `farandole train` would fine-tune the model in `folder` as a classifier (BERT or ViT)."""
    try:
        return read_config(folder, with_weights=False).architecture.name in ("bert", "vit")
    except FolderError as error:
        raise ConfigError(f"hf:{folder}: {error}") from None


def _given(setup: PlanSetup, config: TrainConfig, overrides: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the values that the user specified for `Plan` fields, with options or in the configuration."""
    choices: dict[str, Sequence[Any]] = {name: values for name, values in setup.choices.items() if values}
    section = config.plan
    for word in overrides:
        name = word.partition("=")[0].strip().removeprefix("plan.")
        if name in _FIELDS and (name, section.precision) != ("precision", "auto"):
            choices.setdefault(name, [getattr(section, name)])
    if section.swap != "none":
        choices.setdefault("swap", [section.swap])
    if section.data:
        choices["data"] = [section.data]
    if section.stage_bytes:
        choices.setdefault("stage_bytes", [section.stage_bytes])
    if section.compression != "none":
        choices.setdefault("zero", [0])
    for name, known in _KNOWN.items():
        _check(f"--{name}", [str(one) for one in choices.get(name, ())], known)
    return choices


def check(planned: Planned, steps: int) -> tuple[dict[int, Estimate], list[dict[str, Any]]]:
    """Train for `steps` steps with the first plan, and measure each rank's memory and time.

    Returns:
        A dict that maps ranks to estimates, and a list with one dict of measurements per rank.  The keys of the
        measurements are the fields of `plan_check.Seen`.

    Raises:
        BenchError: if a rank fails, or this machine cannot run the plan.
    """
    first = planned.estimates[0].plan
    if planned.machine.host == torch.cuda.is_available():
        raise BenchError(
            "--check trains on this machine, but the plans are for another kind of device; omit --check"
        )
    if not planned.estimates[0].fits(planned.machine.memory):
        raise BenchError(
            "--check requires a plan that fits, but no plan fits; use more ranks or a smaller model"
        )
    if planned.config.task != "text":
        raise BenchError(
            f"--check trains on random text with task='text' only, got task={planned.config.task!r}; omit --check"
        )
    config = _with(planned.config, first)
    count, samples = config.micro_batches(planned.ranks)
    passes = min(count, _CHECKED_PASSES * first.pipeline)
    replicas = planned.ranks // first.ranks_per_sample
    section = config.plan.model_copy(update={"micro_batches": 0})
    config = config.model_copy(
        update={"batch": passes * samples * replicas, "micro_batch": samples, "plan": section}
    )
    workload = replace(planned.workload, micro_batches=passes, checkpoints=False)
    predicted = estimate_ranks(workload, first, planned.ranks, planned.machine)
    found = result_of_ranks(
        "farandole.bench.plan_check",
        lambda answer: PlanCheckJobSpec(config, first.precision, steps, answer).dump(),
        ranks=planned.ranks,
        failure="--check failed",
    )
    return predicted, json.loads(found)


def _with(config: TrainConfig, plan: Plan) -> TrainConfig:
    """Return a copy of `config` in which the fields `_FIELDS` have the values from `plan`."""
    chosen = {name: value for name in _FIELDS if (value := getattr(plan, name)) is not None}
    return parse_config({**config.model_dump(), "plan": {**config.plan.model_dump(), **chosen}})


def _meshes(config: TrainConfig, model: nn.Module, ranks: int, nodes: int) -> dict[str, Sequence[Any]]:
    """Return the values to consider for each mesh axis, for plans on accelerators."""
    experts = max((module.count for module in model.modules() if isinstance(module, Experts)), default=1)
    pieces = max(1, config.model.context // _LEAST_POSITIONS)
    micro_batches = config.plan.micro_batches or (ranks if config.micro_batch else 1)
    # a pipeline requires micro-batches
    stages = 1 if config.plan.lora_rank else min(ranks, micro_batches, _MOST_STAGES)
    return {
        "tensor": _sizes(ranks // nodes),  # a tensor-parallel group stays on one host
        "sequence": [False, True],
        "context": _sizes(min(ranks, pieces)),
        "expert": sorted({1, min(ranks // nodes, experts), min(ranks, experts)}),
        "pipeline": _sizes(stages),
    }


def _sizes(most: int) -> list[int]:
    """Return the powers of two up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def dump(planned: Planned) -> str:
    """Return JSON with the number of ranks, the machine, and the plans.

    Each plan has its peak memory, its time per step in seconds, and a text that states whether it fits.
    """
    plans = [
        {
            **asdict(one),
            "peak": one.peak,
            "seconds": one.seconds,
            "outcome": one.outcome(planned.machine.memory),
        }
        for one in planned.estimates
    ]
    return json.dumps({"ranks": planned.ranks, "machine": asdict(planned.machine), "plans": plans}, indent=1)


def _candidates(
    ranks: int, axes: Mapping[str, Sequence[Any]], meshes: Sequence[tuple[Any, ...]] = ()
) -> list[Plan]:
    """Return the plans for all valid combinations of the values in `axes`, limited to `meshes` unless it is empty."""
    plans: list[Plan] = []
    refusal: PlanError | None = None
    if meshes:
        axes = {**axes, **{name: sorted(set(sizes)) for name, *sizes in zip(_AXES, *meshes, strict=True)}}
    for values in itertools.product(*axes.values()):
        try:
            candidate = Plan(**dict(zip(axes, values, strict=True)))
            candidate.sizes(ranks)
            if not meshes or _axes_of(candidate) in meshes:
                plans.append(candidate)
        except PlanError as error:  # this combination of values is invalid
            refusal = error
    if not plans and refusal is not None:
        raise refusal
    return plans


def _check_batch(config: TrainConfig, plans: Sequence[Plan], ranks: int) -> None:
    """Raise `ConfigError` if none of `plans` can divide the batch equally."""
    refusal: ConfigError | None = None
    for alike in {_axes_of(one): one for one in plans}.values():
        try:
            _with(config, alike).micro_batches(ranks)
            return
        except ConfigError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def _estimates(
    config: TrainConfig,
    model: nn.Module,
    ranks: int,
    machine: Machine,
    axes: Mapping[str, Sequence[Any]],
    meshes: Sequence[tuple[Any, ...]] = (),
) -> tuple[Machine, list[Estimate]]:
    """Return the machine, and the estimates of plans with the values in `axes`, best first."""
    plans = _candidates(ranks, axes, meshes)
    folders = {Place.parse(place).folder for one in plans for place in (one.offload, one.swap)}
    if disks := folders - {""}:
        machine = replace(machine, disk=measure_bandwidth(min(disks)))
    first, rest = plans, list[Plan]()
    if len({_axes_of(one) for one in plans}) > _REFINED:
        # compare the meshes with one kind of plan, and estimate the other plans only for the best meshes
        first, rest = _simplest(plans)
    estimated = partial(_estimated, config, model, ranks, machine, StageTracer())
    found, refused = estimated(first)
    if not found and refused is not None:
        raise refused
    found = in_order(found, machine.memory)
    for mesh in _best_meshes(found):
        for mode in ("none", "selective", "attention", "block"):  # from the fastest to the slowest
            members = [one for one in rest if _axes_of(one) == mesh and one.recompute == mode]
            more, _ = estimated(members)
            found += more
            if any(one.fits(machine.memory) for one in more):
                break
    return machine, in_order(found, machine.memory)


def _simplest(plans: Sequence[Plan]) -> tuple[list[Plan], list[Plan]]:
    """Divide `plans` into the plans that are used to compare meshes, and the other plans."""
    first: list[Plan] = []
    for _, members in itertools.groupby(sorted(plans, key=_axes_of), _axes_of):
        of_mesh = list(members)
        first += [one for one in of_mesh if one.recompute == "block" and one.schedule == "1f1b"] or of_mesh
    chosen = set(first)
    return first, [one for one in plans if one not in chosen]


def _estimated(
    config: TrainConfig,
    model: nn.Module,
    ranks: int,
    machine: Machine,
    tracer: StageTracer,
    plans: Sequence[Plan],
) -> tuple[list[Estimate], Exception | None]:
    """Return the estimates of the valid plans, and the error of one invalid plan if there is one."""
    found: list[Estimate] = []
    refusal: Exception | None = None
    shared: set[tuple[Any, ...]] = set()  # the meshes for which sequence parallelism is possible
    for axes, members in itertools.groupby(sorted(plans, key=_axes_of, reverse=True), _axes_of):
        alike = list(members)
        tensor, sequence, *others = axes
        if not sequence and (tensor, *others) in shared:
            continue  # without sequence parallelism, a rank needs more memory and as much time
        try:
            workload = workload_of(_with(config, alike[0]), ranks, model)
            # each rank reads its shards of the weights from the folder
            workload = replace(workload, block_by_block=bool(config.model.folder))
            found += estimates_of(workload, ranks, machine, alike, tracer)
            if sequence:
                shared.add((tensor, *others))
        except (PlanError, ConfigError) as error:  # the model or the batch cannot be split like this
            refusal = error
    return found, refusal


def _best_meshes(estimates: Sequence[Estimate]) -> list[tuple[Any, ...]]:
    """Return the first `_REFINED` distinct meshes in `estimates`, which must be sorted best first."""
    return list(dict.fromkeys(_axes_of(one.plan) for one in estimates))[:_REFINED]


def _axes_of(plan: Plan) -> tuple[Any, ...]:
    return tuple(getattr(plan, name) for name in _AXES)


def accelerator_named(name: str) -> Accelerator:
    """Return the accelerator `name` from `ACCELERATORS`.

    Raises:
        BenchError: if the name is unknown; the message suggests a similar name.
    """
    if name not in ACCELERATORS:
        near = difflib.get_close_matches(name, ACCELERATORS, 1)
        hint = f"nearest: {near[0]}; " if near else ""
        raise BenchError(
            f"--accelerators {name} is unknown; {hint}known names are {', '.join(ACCELERATORS)}; describe others with "
            "--memory, --flops and --bandwidth"
        )
    return ACCELERATORS[name]


def _this_machine(setup: PlanSetup, ranks: int, nodes: int) -> Machine:
    """Return a `Machine` for this machine with the values in `setup`; other values are measured or assumed."""
    found = _speeds(setup, ranks)
    accelerated = torch.cuda.is_available()
    if setup.memory is not None:
        memory = setup.memory
    elif accelerated:
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = available_memory() * nodes // ranks
    return Machine(
        memory=memory,
        flops=found.flops,
        stream=found.stream,
        bandwidth=found.bandwidth,
        host_bandwidth=setup.host_bandwidth,
        process=found.process,
        libraries=0 if accelerated else found.libraries,
        hosts=nodes,
        shared=not accelerated,
        overlap=accelerated,
        host=not accelerated,
    )


def _speeds(setup: PlanSetup, ranks: int) -> Speeds:
    """Return the speeds of a rank on this machine; speeds in `setup` replace measured speeds."""
    flops, bandwidth = setup.flops, setup.bandwidth
    if bandwidth is None and ranks == 1:
        bandwidth = Machine.bandwidth  # a single rank sends no messages
    if flops is not None and bandwidth is not None and not setup.remeasure:
        accelerated = torch.cuda.is_available()
        return Speeds(  # nothing is measured; the other values are typical
            flops=dict.fromkeys(_PRECISIONS, flops),
            stream=flops / (_FLOPS_PER_BYTE if accelerated else _HOST_FLOPS_PER_BYTE),
            bandwidth=bandwidth,
            process=CONTEXT_BYTES if accelerated else PROCESS_BYTES,
            libraries=LIBRARY_BYTES,
        )
    found = speeds(ranks, remeasure=setup.remeasure)
    if flops is not None:
        found = replace(found, flops=dict.fromkeys(found.flops, flops))
    return found if bandwidth is None else replace(found, bandwidth=bandwidth)


def _published(setup: PlanSetup, accelerator: Accelerator, nodes: int) -> Machine:
    """Return a `Machine` with the values in `setup`, or else the published values of `accelerator`."""
    flops: Mapping[str, float] = accelerator.flops
    stream, host_bandwidth = accelerator.stream, setup.host_bandwidth
    if setup.flops is not None:
        flops, stream = dict.fromkeys(_PRECISIONS, setup.flops), setup.flops / _FLOPS_PER_BYTE
    if host_bandwidth is None and setup.bandwidth is None and nodes > 1:
        host_bandwidth = accelerator.host_bandwidth
    return Machine(
        memory=setup.memory or accelerator.memory,
        flops=flops,
        stream=stream,
        bandwidth=setup.bandwidth or accelerator.bandwidth,
        host_bandwidth=host_bandwidth,
        process=CONTEXT_BYTES,
        libraries=0,
        hosts=nodes,
        shared=False,
        overlap=True,
        host=False,
    )


def _precision(config: TrainConfig, *, host: bool) -> str:
    """Return the precision in `config`, or the precision that `farandole train` would choose for "auto"."""
    if config.plan.precision != "auto":
        return config.plan.precision
    if not host:
        return "bf16"
    return "bf16" if bf16_unit(torch.device("cpu")) else "fp32"


def _check(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for one in given:
        if one not in known:
            near = difflib.get_close_matches(one, known, 1)
            hint = f"nearest: {near[0]}" if near else f"expected one of {', '.join(known)}"
            raise BenchError(f"{option} {one} is unknown; {hint}")
