"""Random training programs, run under a plan and in one process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import farandole
from farandole import Plan, PlanError
from farandole.parallel.engine import Engine
from farandole.parallel.pipeline.apply import check, schedule_of
from farandole.parallel.pipeline.schedule import Schedule, registered
from tests.random_programs.blocks import WORDS, Checkpointed, GiveWeights, RunningMean, random_model

STEPS, CLIP = 3, 0.3

Batch = tuple[Tensor, Tensor]  # tokens and targets, where -1 is ignored

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, weight_decay=0.05),
    "nesterov": lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.8, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, 1e-2, weight_decay=0.1, eps=1e-3),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, 1e-2, amsgrad=True, foreach=True, eps=1e-3),
    "fused": lambda groups: torch.optim.AdamW(groups, 1e-2, fused=True, eps=1e-3),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, 1e-3, momentum=0.5, centered=True, eps=1e-2),
}
"""Optimizers with a large epsilon, so that rounding errors of small gradients do not change the weights much."""


@dataclass(frozen=True)
class Program:
    """All random choices except the model and the samples, which are created from the seed.

    Attributes:
        loop: how gradients are computed (`_Replica.backward`).
        clip: "engine" or "torch" clips the gradient norm; None does not.
        clear: how gradients are cleared.
        divided: whether the parameters have two groups, two optimizers or one group.
        resumed: the plan that continues from a checkpoint for the last step; None does not save.
    """

    seed: int
    plan: Plan
    optimizer: str
    loop: str
    clip: str | None
    clear: str
    divided: str
    resumed: Plan | None


def random_program(seed: int) -> Program:
    """Return a program for two or four ranks."""
    choose, model = random.Random(seed), random_model(seed)
    pipeline = choose.choice([1, 2])
    loops = (
        ["forward_backward"]
        if pipeline > 1
        else ["forward_backward", "plain", "accumulate", "no_sync", "twice"]
    )
    loop = choose.choice(loops)
    resumed = _random_plan(choose, model, pipeline) if choose.random() < 0.3 else None
    clears = ["optimizer", "model", "none", "engine"]
    if resumed is None and loop != "forward_backward":
        clears.append("zeros")  # a checkpoint contains no gradients, so a zero would become None
    return Program(
        seed,
        _random_plan(choose, model, pipeline),
        optimizer=choose.choice(list(OPTIMIZERS)),
        loop=loop,
        clip=choose.choice(["engine", None] if pipeline > 1 else ["engine", "torch", None]),
        clear=choose.choice(clears),
        divided=choose.choice(["no", "no", "groups", "optimizers"]),
        resumed=resumed,
    )


def _random_plan(choose: random.Random, model: nn.Module, pipeline: int) -> Plan:
    """Return a plan whose schedule, if any, supports the model and the other options."""
    while True:
        zero = choose.choice([0, 1, 2, 3])
        offload = choose.choice(["none", "none", "host"])
        recompute = choose.choice(["none", "none", "none", "block", "selective"])
        options: dict[str, Any] = {}
        if offload != "none" and zero >= 2:
            options["offloaded"] = choose.choice(
                ["optimizer", "gradients", *(["parameters"] if zero == 3 else [])]
            )
        if pipeline > 1:
            options |= {"pipeline": pipeline, "schedule": choose.choice(registered()).name}
        with suppress(PlanError):
            plan = Plan(zero=zero, offload=offload, recompute=recompute, **options)
            gathers = plan.offload != "none" and plan.offloaded == "parameters"
            if gathers and any(isinstance(block, GiveWeights) for block in model.children()):
                continue  # the next block would use parameters that are gathered only for one block
            if pipeline == 1:
                return plan
            check(model, plan)
            if _supports(schedule_of(plan), model):
                return plan


def _supports(schedule: Schedule, model: nn.Module) -> bool:
    """Return whether a schedule supports the features of the blocks, apart from those that `check` refuses."""
    if schedule.mirrored and any(isinstance(block, RunningMean) for block in model.children()):
        return False  # two ranks with the same stage have their own running means
    reentrant = any(isinstance(block, Checkpointed) and block.reentrant for block in model.children())
    return not (schedule.splits_backward and reentrant)  # torch refuses to compute only some gradients


def batches(program: Program, step: int, replica: int) -> list[Batch]:
    """Return the micro-batches of a replica, with random numbers of samples, tokens and ignored targets."""
    every, own = random.Random(f"{program.seed} {step}"), random.Random(f"{program.seed} {step} {replica}")
    generator = torch.Generator().manual_seed(own.randrange(1 << 30))
    count = own.randint(1, 4) if program.loop == "forward_backward" else every.randint(1, 3)
    if program.loop in ("plain", "twice"):
        count = 1
    found = []
    for _ in range(count):
        tokens = torch.randint(WORDS, (own.randint(2, 5), every.randint(2, 5)), generator=generator)
        targets = torch.randint(WORDS, tokens.shape, generator=generator)
        targets[: own.choice([0, 0, 1])] = -1
        found.append((tokens, targets))
    return found


def summed_loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, and the number of targets."""
    targets = batch[1].flatten()
    loss = F.cross_entropy(output.float().flatten(0, -2), targets, ignore_index=-1, reduction="sum")
    return loss, (targets >= 0).sum()


def mean_loss(output: Tensor, batch: Batch) -> Tensor:
    loss, count = summed_loss(output, batch)
    return loss / count


@dataclass
class Result:
    """The losses and gradient norms of all steps, the loss of new samples, and the final state."""

    losses: list[float]
    norms: list[float]
    metric: float
    state: dict[str, Tensor]


def optimizers_of(program: Program, model: nn.Module) -> list[torch.optim.Optimizer]:
    create, parameters = OPTIMIZERS[program.optimizer], list(model.parameters())
    first = {"params": [parameter for parameter in parameters if parameter.ndim > 1]}
    last = {"params": [parameter for parameter in parameters if parameter.ndim <= 1]}
    if program.divided == "optimizers":
        return [create([first]), create([last])]
    if program.divided == "groups":
        return [create([first, {**last, "lr": 3e-3, "weight_decay": 0.0}])]
    return [create(parameters)]


def _update(program: Program, model: nn.Module, optimizers: list[Any], engine: Engine | None) -> float:
    """Clip, step and clear the gradients; return their norm before, or 0 without clipping."""
    norm = 0.0
    if program.clip == "engine" and engine is not None:
        norm = engine.clip(CLIP)
    elif program.clip is not None:
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    for optimizer in optimizers:
        optimizer.step()
    if program.clear == "engine" and engine is not None:
        engine.zero_grad()
    elif program.clear == "none":
        for parameter in model.parameters():
            parameter.grad = None
    elif program.clear == "optimizer":
        for optimizer in optimizers:
            optimizer.zero_grad()
    else:
        model.zero_grad(set_to_none=program.clear != "zeros")
    return norm


# ---- one process ----


def alone(program: Program, replicas: int) -> Result:
    """Train on the samples of all replicas in one process; each replica has its own buffers during a step."""
    model = random_model(program.seed)
    optimizers = optimizers_of(program, model)
    losses, norms = [], []
    for step in range(STEPS):
        parts = _on_replicas(model, [batches(program, step, replica) for replica in range(replicas)])
        if program.loop == "forward_backward":
            loss = sum(loss for part in parts for loss, _ in part) / sum(
                count for part in parts for _, count in part
            )
        else:
            loss = sum(loss / count for part in parts for loss, count in part) / replicas
        objective = loss
        if program.loop == "twice":
            objective = (
                loss + 0.01 * sum((loss / count) ** 2 for part in parts for loss, count in part) / replicas
            )
        objective.backward()
        losses.append(float(loss.detach()))
        norms.append(_update(program, model, optimizers, None))
    model.eval()
    with torch.no_grad():
        parts = _on_replicas(model, [batches(program, STEPS, replica) for replica in range(replicas)])
    metric = float(
        sum(loss for part in parts for loss, _ in part) / sum(count for part in parts for _, count in part)
    )
    return Result(losses, norms, metric, model.state_dict())


def _on_replicas(model: nn.Module, samples: list[list[Batch]]) -> list[list[Any]]:
    """Return the losses and counts of each replica's micro-batches, and average the replicas' buffers."""
    before = [buffer.clone() for buffer in model.buffers()]
    losses, buffers = [], []
    for own in samples:
        _set_buffers(model, before)
        losses.append([summed_loss(model(batch[0]), batch) for batch in own])
        buffers.append([buffer.detach().clone() for buffer in model.buffers()])
    averages = [
        torch.stack(each).mean(0) if each[0].is_floating_point() else each[0]
        for each in zip(*buffers, strict=True)
    ]
    _set_buffers(model, averages)
    return losses


def _set_buffers(model: nn.Module, values: list[Tensor]) -> None:
    """Replace all buffers with copies of `values`; a graph may have saved the previous buffers."""
    remaining = iter(values)
    for module in model.modules():
        for name, _ in list(module.named_buffers(recurse=False)):
            setattr(module, name, next(remaining).clone())


# ---- under a plan ----


def parallel(program: Program, folder: Path) -> Result:
    """Train this rank's samples under the plan, and continue from a checkpoint for the last step if asked."""
    losses: list[float] = []
    norms: list[float] = []
    saved = STEPS - 1 if program.resumed else STEPS
    model = random_model(program.seed)
    with closing(farandole.parallelize(model, program.plan)) as engine:
        metric = _train(program, engine, model, range(saved), losses, norms)
        state = copy.deepcopy(engine.state_dict())
        if program.resumed:
            engine.save(folder / "checkpoint")
    if program.resumed:
        model = random_model(program.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with closing(farandole.parallelize(model, program.resumed)) as engine:
            metric = _train(program, engine, model, range(saved, STEPS), losses, norms, folder)
            state = copy.deepcopy(engine.state_dict())
    return Result(losses, norms, metric, state)


def _train(
    program: Program,
    engine: Engine,
    model: nn.Module,
    steps: range,
    losses: list[float],
    norms: list[float],
    folder: Path | None = None,
) -> float:
    """Train the steps, append their losses and norms, and return the loss of new samples."""
    optimizers = [engine.optimizer(optimizer) for optimizer in optimizers_of(program, model)]
    if folder is not None:
        engine.load(folder / "checkpoint")
    replica = engine.mesh.replica_of(dist.get_rank())
    for step in steps:
        losses.append(_gradients(program, engine, batches(program, step, replica)))
        norms.append(_update(program, model, optimizers, engine))
    return engine.evaluate(batches(program, STEPS, replica), summed_loss)


def _gradients(program: Program, engine: Engine, own: list[Batch]) -> float:
    """Compute the gradients of a step, and return its loss."""
    if program.loop == "forward_backward":
        return engine.forward_backward(own, summed_loss).loss
    total = torch.zeros(())
    for number, batch in enumerate(own):
        last = number == len(own) - 1
        quiet: AbstractContextManager[Any] = nullcontext()
        if program.loop == "no_sync" and not last:
            quiet = engine.no_sync()
        with quiet:
            loss = mean_loss(engine(batch[0]), batch)
            loss.backward(retain_graph=program.loop == "twice")
            if program.loop == "twice":
                (0.01 * loss**2).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
