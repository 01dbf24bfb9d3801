"""Create an engine for a model and a plan.

    runtime = farandole.init()
    engine = farandole.parallelize(model, Plan(zero=2, precision="bf16"))
    optimizer = engine.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    for inputs, targets in batches:
        engine.backward(loss_of(engine(inputs), targets))
        engine.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

A plan is applied in this order: LoRA, 8-bit floats, expert parallelism, tensor parallelism, context parallelism,
recomputation, pipeline stages, then data parallelism and ZeRO in the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import compression_named
from farandole.data.wording import counted, size
from farandole.memory.recompute import apply_recompute
from farandole.memory.swap import check_swap, swap_activations
from farandole.parallel.agreed_errors import agreed_errors
from farandole.parallel.axes import Layouts, Position, hosts_of
from farandole.parallel.engine import Engine
from farandole.parallel.lora import add_lora
from farandole.parallel.loss_scaling import LossScaler
from farandole.parallel.matrix_products import use_fast_products
from farandole.parallel.optimizers.rounding import StochasticRounding
from farandole.parallel.pipeline import apply as pipeline
from farandole.parallel.pipeline.memory import RankActivations
from farandole.parallel.pipeline.runtime import Pipeline
from farandole.parallel.precision import TYPES, check_float8, check_float8_sizes, use_float8
from farandole.parallel.restored_model import restored_after_error
from farandole.parallel.whole_parameters import check_model
from farandole.parallel.zero.initial_values import Initialize, broadcast_from_first, is_deferred
from farandole.parallel.zero.sharding import box_mesh, moves_parameters
from farandole.plan import MODEL_AXES, LoRA, Plan, PlanError

_log = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    plan: Plan | None = None,
    comm: Communicator | None = None,
    *,
    example: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    initialize: Initialize | None = None,
    diagnose: bool = False,
    watch: bool = False,
    report: bool = True,
) -> Engine:
    """Return an engine that trains `model` on all ranks of `comm` under `plan`.  This is a collective call.

    All ranks start with the parameters of rank 0.  The engine owns the parameters of `model`: call the engine instead
    of the model.  The layers that are recomputed or get adapters are logged at level INFO.

    Args:
        model: the model on a CPU or accelerator, or on the meta device with `initialize` or a `weight_source`.
        plan: the plan, by default `Plan()`.  Ranks that share layers or sequences must receive the same samples.  LoRA
            adapters and stochastic rounding depend on torch's seed on rank 0.
        comm: the communicator, by default with all ranks of the job.
        example: the input of one micro-batch.  `recompute="attention"`, `recompute="auto"` and `stage_bytes` use it to
            measure activations.  If the model is in memory and `pipeline` is above 1, `example` is also used to
            measure the time of each block, so that all stages take about the same time.
        loss: a function that computes the loss from the model's output, for the measurement of activations.
        initialize: `initialize(name, block)` fills one block of a model on the meta device, so that a process needs
            memory only for its shards and one block.
        diagnose: with `precision="fp16"`, check the outputs of blocks in every step, so that the report of the first
            overflow names the block.
        watch: check the gradients of each rank before they are averaged, so that `Engine.locate_nonfinite` names the
            rank and the parameter.
        report: log a line on rank 0 for each fp16 overflow.

    Raises:
        PlanError: if the plan is not valid for the ranks or the model.  Another plan can then be applied to the model.
        RuntimeError: if no process group exists.
    """
    plan = plan or Plan()
    if comm is None:
        if not dist.is_initialized() or dist.group.WORLD is None:
            raise RuntimeError("parallelize requires a process group: call farandole.init() first")
        comm = Communicator(dist.group.WORLD)
    use_fast_products()
    with agreed_errors(comm):
        sizes = plan.sizes(comm.size)
        _check(model, plan, diagnose=diagnose)
    with restored_after_error(model):
        position, layouts, stages = _convert(model, plan, comm, sizes, example, loss)
    options: dict[str, Any] = {
        "zero": plan.zero,
        "dtype": _compute_type(plan),
        "offload": plan.offload,
        "offloaded": plan.offloaded,
        "initialize": initialize,
        "compression": compression_named(plan.compression),
        "watch": watch,
        "report": report,
        "mesh": position.mesh,
        "layouts": layouts,
        "pipeline": stages,
    }
    if plan.precision == "fp16":
        options |= {"scaler": LossScaler(), "diagnose": diagnose}
    if plan.rounding == "stochastic":
        options["rounding"] = StochasticRounding(_common_seed(comm))
    engine = Engine(model, comm, **options)
    _share_generators(position)
    if plan.swap != "none":
        with agreed_errors(comm):
            passes = () if stages is None else stages.views
            engine.swap(swap_activations(model, plan.swap, passes=passes))
    return engine


def _compute_type(plan: Plan) -> torch.dtype | None:
    """Return the dtype in which the model computes, or None for the dtypes of its parameters."""
    return None if plan.precision == "fp32" else TYPES[plan.precision]


def _check(model: nn.Module, plan: Plan, *, diagnose: bool) -> None:
    """Raise PlanError if the model or `diagnose` does not fit `plan`."""
    inner = any(getattr(plan, axis) > 1 for axis in ("pipeline", *MODEL_AXES))
    moved = moves_parameters(plan.zero, _compute_type(plan), plan.offload, {})
    check_model(model, moved=moved or plan.tensor > 1 or plan.expert > 1)
    if plan.pipeline > 1:
        pipeline.check(model, plan)
    wide = (torch.float32, torch.float64)
    odd = [(n, p.dtype) for n, p in model.named_parameters() if p.is_floating_point() and p.dtype not in wide]
    if plan.precision == "fp32" and odd:
        raise PlanError(
            f"precision='fp32' requires fp32 parameters, but {odd[0][0]} has dtype {odd[0][1]}: create the model in fp32, "
            "or call model.float() before parallelize"
        )
    complex_ = [n for n, p in model.named_parameters() if p.is_complex() and p.requires_grad]
    if plan.precision == "fp16" and complex_:
        raise PlanError(
            f"precision='fp16' does not support complex parameters such as {complex_[0]}; nearest plan: precision='bf16'"
        )
    if diagnose and plan.precision != "fp16":
        raise PlanError(
            f"diagnose=True requires precision='fp16', got {plan.precision!r}, whose steps are never "
            "skipped; nearest plan: diagnose=False"
        )
    if plan.swap != "none":
        _check_swap(model, plan)
    if inner and plan.lora is not None and plan.lora.base is not None:
        axis = next(axis for axis in ("pipeline", *MODEL_AXES) if getattr(plan, axis) > 1)
        raise PlanError(
            f"lora.base={plan.lora.base!r} with {axis}={getattr(plan, axis)}: quantized weights are supported only with data "
            f"parallelism; nearest plan: lora.base=None, or {axis}=1 with more ranks on the data axis"
        )


def _convert(
    model: nn.Module,
    plan: Plan,
    comm: Communicator,
    sizes: dict[str, int],
    example: Any,
    loss: Callable[[Any], Tensor] | None,
) -> tuple[Position, Layouts, Pipeline | None]:
    """Apply the parts of `plan` that change the model's modules.  This is a collective call."""
    converted: list[str] = []
    with agreed_errors(comm):
        if plan.lora is not None:
            _add_lora(model, plan.lora)
        if plan.precision == "fp8":
            check_float8(_device_of(model))
            converted = use_float8(model)
    position, layouts = _split(model, plan, comm, sizes)
    stages = None
    with agreed_errors(comm):
        check_float8_sizes(model, converted)
        # while the model is complete, because a single rank cannot run a model that is divided into stages
        if plan.pipeline == 1 or plan.recompute != "auto":
            _recompute(model, plan, example, loss)
        if plan.pipeline > 1:
            division = pipeline.measured_division(model, position, plan, example, _compute_type(plan))
            if plan.recompute == "auto":
                own = pipeline.activations_of(model, position, plan, division)
                _recompute(model, plan, example, loss, own)
            stages = pipeline.apply(model, position, plan, layouts, division)
    return position, layouts, stages


def _split(
    model: nn.Module, plan: Plan, comm: Communicator, sizes: dict[str, int]
) -> tuple[Position, Layouts]:
    """Apply expert, tensor and context parallelism to `model`.  This is a collective call."""
    axes = ("pipeline", *MODEL_AXES)
    inner = any(sizes[axis] > 1 for axis in axes)
    hosts = hosts_of(comm) if inner or plan.data_shard != "all" else ()
    mirrored = plan.pipeline > 1 and pipeline.schedule_of(plan).mirrored
    mesh = box_mesh(comm.size, hosts, data_shard=plan.data_shard, **sizes, mirror=2 if mirrored else 1)
    layouts = Layouts(model)
    sets: list[tuple[str, ...]] = [(axis,) for axis in axes]
    if plan.pipeline > 1:
        sets += [("mirror",), pipeline.REPLICA_AXES, pipeline.STAGE_AXES]
    groups = mesh.connect(comm, sets) if inner else None
    # in a mirrored pipeline, a rank has the position of its stage in the first replica
    cell = min(mesh.of_rank(comm.rank), key=lambda cell: cell.mirror)
    position = Position(mesh, cell, groups)
    if inner:
        broadcast_from_first(model, comm)
        with agreed_errors(comm):
            apply_axes(model, position, plan, layouts)
        position.connect()
    return position, layouts


def apply_axes(model: nn.Module, position: Position, plan: Plan, layouts: Layouts) -> None:
    """Apply expert, tensor and context parallelism, in this order, to the layers of `model`."""
    # imported here, because these modules import most models, and data parallelism needs none of them
    from farandole.parallel import context, expert, tensor

    for axis in (expert, tensor, context):
        axis.apply(model, position, plan, layouts)


def _share_generators(position: Position) -> None:
    """Give ranks that share samples the same state of torch's random number generator, for dropout."""
    for axis in ("tensor", "context"):
        comm = None if position.groups is None else position.groups.of(position.cell, axis).comm
        if comm is None:
            continue
        state = torch.get_rng_state()
        comm.broadcast(state)
        torch.set_rng_state(state)
        if torch.cuda.is_initialized():
            state = torch.cuda.get_rng_state()
            comm.broadcast(state)
            torch.cuda.set_rng_state(state)


def _add_lora(model: nn.Module, lora: LoRA) -> None:
    if is_deferred(model) and (lora.base is not None or not hasattr(model, "weight_source")):
        raise PlanError(
            "LoRA is not supported for a model on the meta device without weights: create the model in "
            "memory, or with from_pretrained(folder, lazy=True)"
        )
    try:
        _log.info("LoRA: %s", add_lora(model, lora))
    except ValueError as error:
        raise PlanError(str(error)) from error


def _check_swap(model: nn.Module, plan: Plan) -> None:
    try:
        check_swap(model, plan.swap, _device_of(model))
    except ValueError as error:
        raise PlanError(str(error)) from error


def _device_of(model: nn.Module) -> torch.device:
    """Return the device on which the model computes; for a model on the meta device, the default device."""
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    return devices[0] if devices else torch.get_default_device()


def _recompute(
    model: nn.Module,
    plan: Plan,
    example: Any,
    loss: Callable[[Any], Tensor] | None,
    activations: RankActivations | None = None,
) -> None:
    """Apply `plan.recompute` to all blocks, or only to the blocks in `activations`."""
    try:
        done = apply_recompute(
            model,
            plan.recompute,
            example=example,
            loss=loss,
            budget_bytes=plan.activation_bytes,
            dtype=_compute_type(plan),
            blocks=None if activations is None else activations.blocks,
            kept=None if activations is None else activations.bytes,
        )
    except ValueError as error:
        raise PlanError(str(error).replace("budget_bytes", "activation_bytes")) from error
    if done.modules:
        kept = ""
        in_step = plan.pipeline == 1 or activations is not None  # otherwise the bytes are those of all stages
        if in_step and done.before is not None and done.after is not None:
            who = "each rank" if activations is None else "this rank"
            kept = f"; {who} keeps {size(done.after)} of activations instead of {size(done.before)}"
        _log.info(
            "recompute=%r: recomputing %s%s", plan.recompute, counted(len(done.modules), "module"), kept
        )


def _common_seed(comm: Communicator) -> int:
    """Return rank 0's torch seed.  This is a collective call."""
    seed = torch.tensor(torch.initial_seed() % 2**63)
    if comm.size > 1:
        comm.broadcast(seed)
    return int(seed)
