"""Divide a model into the pipeline stages of a plan, and reject unsupported models and plans."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from farandole.models.moe import routers_of
from farandole.parallel.axes import Layouts, Position
from farandole.parallel.lora.description import describe_adapter
from farandole.parallel.pipeline.balance import Balance, measure_blocks
from farandole.parallel.pipeline.batch_norm import BatchNormStatistics, tracking_layers
from farandole.parallel.pipeline.memory import AUTO, RankActivations, block_sizes, steady
from farandole.parallel.pipeline.runtime import Pipeline
from farandole.parallel.pipeline.schedule import Schedule, ScheduleError, build
from farandole.parallel.pipeline.stage import COMPILED, divide, shallow_copy, split, stages_of
from farandole.parallel.pipeline.stage_peers import StagePeers
from farandole.parallel.zero.initial_values import is_deferred
from farandole.plan import MODEL_AXES, Plan, PlanError

_log = logging.getLogger(__name__)

MEASURED = ("attention", "auto")
"""The recomputation modes that require a dry run with an example."""

REPLICA_AXES = ("data", "mirror")
"""The axes along which ranks run the same stages on different samples."""

STAGE_AXES = ("pipeline", *MODEL_AXES)
"""The axes along which ranks exchange tensors in forward passes."""


def measured_division(
    model: nn.Module,
    position: Position,
    plan: Plan,
    example: Any = None,
    dtype: torch.dtype | None = None,
) -> Balance:
    """Divide the blocks of a complete model into stages.

    This is a collective call.

    Args:
        model: a model that `check` accepts.
        example: the input of one micro-batch, used to measure the time of each block.  Without `example`, or if the
            model is on the meta device, `balance.parameter_costs` estimates the times.
        dtype: the dtype in which the model computes.

    Raises:
        PlanError: as for `divided`, or if blocks cannot be measured.
    """
    sequential, costs = _sequential(model), None
    if (
        example is not None
        and is_deferred(model)
        and plan.stage_bytes is None
        and plan.recompute not in MEASURED
    ):
        raise PlanError(
            "example= with a model on the meta device: blocks without values cannot be measured; omit example, or create the "
            "model in memory"
        )
    if example is not None and not is_deferred(model) and position.groups is not None:
        seconds = [cost.seconds for cost in measure_blocks(sequential, example)]
        costs = position.groups.comm.broadcast_object(seconds)  # ranks measure different times
    return divided(sequential, plan, example, dtype, costs)


def divided(
    model: nn.Sequential,
    plan: Plan,
    example: Any,
    dtype: torch.dtype | None,
    costs: Sequence[float] | None = None,
) -> Balance:
    """Divide the blocks of a model into the stages of a plan; each stage must fit in `Plan.stage_bytes`.

    Args:
        example: the input of one micro-batch; required if `Plan.stage_bytes` is set.
        dtype: the dtype in which the model computes.
        costs: the cost of each block; by default, `balance.parameter_costs` estimates the costs.

    Raises:
        PlanError: if the model has too few blocks, or no division fits.
    """
    schedule, sizes = schedule_of(plan), None
    if plan.stage_bytes is not None:
        if example is None:
            raise PlanError(
                f"stage_bytes={plan.stage_bytes} requires example=(the input of one micro-batch) to measure activations"
            )
        sizes = block_sizes(model, schedule, example, dtype)
    return divide(model, schedule, costs, sizes, plan.stage_bytes)


def activations_of(model: nn.Module, position: Position, plan: Plan, division: Balance) -> RankActivations:
    """Return the blocks and activations of this pipeline rank.

    Args:
        model: the complete model.
    """
    return RankActivations(_sequential(model), division, schedule_of(plan), position.coordinate("pipeline"))


def apply(model: nn.Module, position: Position, plan: Plan, layouts: Layouts, division: Balance) -> Pipeline:
    """Remove the blocks of other ranks from `model`, and return the pipeline of this rank's stages.

    Args:
        model: a model that `check` accepts.
        division: the blocks of each stage.
    """
    schedule, sequential = schedule_of(plan), _sequential(model)
    rank = position.coordinate("pipeline")
    complete = shallow_copy(sequential) if is_deferred(model) else None
    experts = {name: len(router.weight) for name, router in routers_of(sequential).items()}
    adapter = describe_adapter(model)
    numbers = stages_of(sequential, division)
    stages, balance = split(sequential, schedule, rank, layouts, division)
    _log.info("pipeline=%d, schedule=%s: %s", plan.pipeline, plan.schedule, balance)
    comm, groups = position.comm("pipeline"), position.groups
    assert comm is not None and groups is not None  # several ranks run the stages
    places = groups.of(position.cell, "pipeline").places
    mirror = groups.of(position.cell, "mirror").comm
    replicas = groups.of(position.cell, *REPLICA_AXES).comm
    layers = {
        number: [layer for block in stage.blocks for layer in tracking_layers(block)]
        for number, stage in stages.items()
    }
    statistics = BatchNormStatistics(layers, mirror, replicas, deferred=plan.deferred_batch_norm)
    replica = groups.of(position.cell, *STAGE_AXES).comm
    assert replica is not None
    found = Pipeline(
        sequential,
        stages,
        plan.schedule,
        comm,
        places,
        rank,
        statistics,
        StagePeers(position),
        replica,
        groups.comm.rank,
    )
    found.stages_of = numbers
    found.complete, found.experts, found.adapter = complete, experts, adapter
    return found


def check(model: nn.Module, plan: Plan) -> None:
    """Check that the pipeline supports the plan and the model.

    Raises:
        PlanError: if the pipeline does not support the plan or the model; the message contains the nearest valid plan.
    """
    _check_plan(plan, schedule_of(plan))
    _check_model(_sequential(model), plan)


def schedule_of(plan: Plan, micro_batches: int = 1) -> Schedule:
    """Return the schedule of a plan.

    Raises:
        PlanError: if the schedule does not support this number of stages or micro-batches.
    """
    try:
        return build(plan.schedule, plan.pipeline, micro_batches)
    except ScheduleError as error:
        raise PlanError(f"schedule={plan.schedule!r} with pipeline={plan.pipeline}: {error}") from error


def _check_plan(plan: Plan, schedule: Schedule) -> None:
    if plan.recompute != "none" and schedule.splits_backward:
        raise PlanError(
            f"schedule={plan.schedule!r} with recompute={plan.recompute!r}: the schedule computes weight "
            "gradients separately, and would recompute activations twice; nearest plan: schedule='1f1b'"
        )
    if plan.zero >= 2 and schedule.mirrored:
        raise PlanError(
            f"schedule={plan.schedule!r} with zero={plan.zero}: ranks with the same stage run it at different times, so they "
            "cannot reduce the gradients of each micro-batch together; nearest plan: zero=1, which shards the optimizer "
            "states over these ranks, or schedule='1f1b'"
        )
    if plan.recompute == "auto":
        steady(schedule, AUTO)


def _sequential(model: nn.Module) -> nn.Sequential:
    if not isinstance(model, nn.Sequential):
        raise PlanError(
            f"expected an nn.Sequential of blocks for pipeline parallelism, got {type(model).__name__}; write the "
            "model as nn.Sequential, or use pipeline=1"
        )
    return model


def _check_model(model: nn.Sequential, plan: Plan) -> None:
    if model._compiled_call_impl is not None:
        raise PlanError(COMPILED)
    inside = {id(tensor) for block in model for tensor in (*block.parameters(), *block.buffers())}
    for name, tensor in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)):
        if id(tensor) not in inside:
            raise PlanError(
                f"{name} belongs to the model itself, not to a block, so no stage contains it; move it into a block, or use "
                "pipeline=1"
            )
    if plan.deferred_batch_norm and not any(isinstance(m, _BatchNorm) for m in tracking_layers(model)):
        raise PlanError(
            "deferred_batch_norm=True: the model has no BatchNorm with running statistics; nearest plan: "
            "deferred_batch_norm=False"
        )
