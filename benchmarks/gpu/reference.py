"""The reference of checks: a small GPT trained by one process, without the package's engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import farandole
from benchmarks.gpu.registry import Context
from farandole.models.gpt import GPTConfig, build_gpt
from farandole.plan import Plan

SMALL = GPTConfig(vocabulary=512, context=64, layers=3, heads=4, width=128)
LARGE = GPTConfig(vocabulary=8192, context=512, layers=8, heads=8, width=512)
SAMPLES = 8
STEPS = 3
RATE = 0.1


def small(context: Context) -> GPTConfig:
    """Return the shape of a model that makes the GPU work, and of a smaller one for a CPU."""
    return LARGE if context.on_cuda else SMALL


def make(context: Context, config: GPTConfig = SMALL, seed: int = 0) -> nn.Module:
    """Return a GPT on the device under test."""
    torch.manual_seed(seed)
    return build_gpt(config).to(context.device)


def batches(context: Context, config: GPTConfig = SMALL, steps: int = STEPS) -> list[Tensor]:
    """Return the same tokens on every rank, (SAMPLES, context + 1) for each step."""
    generator = torch.Generator().manual_seed(1)
    shape = SAMPLES, config.context + 1
    return [
        torch.randint(config.vocabulary, shape, generator=generator).to(context.device) for _ in range(steps)
    ]


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Return torch's mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train_alone(
    context: Context,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    config: GPTConfig = SMALL,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train with the whole batch in plain torch; return parameters by name, and the loss of each step."""
    model, losses = make(context, config), []
    updates = optimizer(model.parameters())
    for tokens in batches(context, config):
        loss = loss_of(model, tokens)
        loss.backward()
        updates.step()
        updates.zero_grad()
        losses.append(float(loss.detach()))
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses


def train_planned(
    context: Context,
    plan: Plan,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    config: GPTConfig = SMALL,
    accumulate: int = 1,
    example: bool = False,
    inspect: Callable[[Any, torch.optim.Optimizer], None] = lambda engine, optimizer: None,
) -> tuple[dict[str, Tensor], list[float], float]:
    """Train as `plan` says, with an equal share of each batch on every rank.

    Returns:
        Parameters by name, the loss of each step averaged over ranks, and seconds per step after the first.
    """
    comm = context.comm
    model = make(context, config, seed=comm.rank)  # the parameters of rank 0 count
    share = SAMPLES // comm.size
    tokens = batches(context, config)
    given = {"example": tokens[0][: share // accumulate, :-1]} if example else {}
    engine = farandole.parallelize(model, plan, comm, **given)
    updates = engine.optimizer(optimizer(model.parameters()))
    losses, seconds = [], []
    for step in tokens:
        began = time.perf_counter()
        *first, last = step.split(share)[comm.rank].split(share // accumulate)
        total = 0.0
        for part in first:
            with engine.no_sync():
                loss = loss_of(engine, part) / accumulate
                engine.backward(loss)
                total += float(loss.detach())
        loss = loss_of(engine, last) / accumulate
        engine.backward(loss)
        total += float(loss.detach())
        updates.step()
        updates.zero_grad()
        context.synchronize()
        seconds.append(time.perf_counter() - began)
        mean = torch.tensor([total], dtype=torch.float64)
        comm.all_reduce(mean, "avg")
        losses.append(float(mean))
    inspect(engine, updates)
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    found = {names[id(p)]: value.detach().float().clone() for p, value in engine.whole_parameters()}
    engine.close()
    return found, losses, sorted(seconds[1:])[len(seconds[1:]) // 2]


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of two models, relative to the largest parameter of each tensor."""
    if found.keys() != expected.keys():
        raise AssertionError(
            f"expected parameters {sorted(expected)}, got {sorted(found)}; compare equal models"
        )
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp_min(1e-12))
        for name, value in expected.items()
    )


def expect(condition: bool, message: str) -> None:
    """Raise AssertionError unless the condition holds; unlike `assert`, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def expect_close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> float:
    """Return the largest difference; raise AssertionError if it exceeds `tolerance` times the largest value."""
    scale = float(expected.abs().max().clamp_min(1e-12)) if expected.numel() else 1.0
    difference = float((found.to(expected.device).double() - expected.double()).abs().max()) / scale
    expect(difference <= tolerance, f"{what}: expected a difference up to {tolerance:g}, got {difference:g}")
    return difference


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD, which shows a wrong scale of gradients."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def milliseconds(context: Context, call: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of a call with the wait for the device, in milliseconds."""
    times = []
    for _ in range(repeats + 3):
        context.synchronize()
        began = time.perf_counter()
        call()
        context.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * sorted(times[3:])[repeats // 2]


def peak_mib(context: Context) -> float:
    """Return the peak of torch's allocator since `reset_peak`, in MiB; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(context.device) / 2**20 if context.on_cuda else 0.0


def reset_peak(context: Context) -> None:
    """Begin a new measurement of `peak_mib`."""
    if context.on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(context.device)
