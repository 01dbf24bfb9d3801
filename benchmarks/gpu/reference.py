"""The reference for checks: a small GPT that one process trains without the package's engines."""

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
    """Return a model configuration: `LARGE` for a GPU, `SMALL` for a CPU."""
    return LARGE if context.on_cuda else SMALL


def make(context: Context, config: GPTConfig = SMALL, seed: int = 0) -> nn.Module:
    """Return a GPT on the device under test."""
    torch.manual_seed(seed)
    return build_gpt(config).to(context.device)


def batches(context: Context, config: GPTConfig = SMALL, steps: int = STEPS) -> list[Tensor]:
    """Return tokens of shape (SAMPLES, context + 1) for each step; they are the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    shape = SAMPLES, config.context + 1
    return [
        torch.randint(config.vocabulary, shape, generator=generator).to(context.device) for _ in range(steps)
    ]


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Return torch's mean cross-entropy for the next token."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train_alone(
    context: Context,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    config: GPTConfig = SMALL,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train on the full batch in plain torch; return the parameters by name, and the loss of each step."""
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
    """Train under `plan`, with an equal share of each batch on every rank.

    Returns:
        The parameters by name, the loss of each step averaged over ranks, and the median seconds per step, without the
        first step.
    """
    comm = context.comm
    model = make(context, config, seed=comm.rank)  # `parallelize` broadcasts the parameters of rank 0
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
    """Return the largest difference between two models, relative to the largest absolute value in each tensor."""
    if found.keys() != expected.keys():
        raise AssertionError(
            f"expected parameters {sorted(expected)}, got {sorted(found)}; compare models with the same parameters"
        )
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp_min(1e-12))
        for name, value in expected.items()
    )


def expect(condition: bool, message: str) -> None:
    """Raise AssertionError if the condition is false; unlike `assert`, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def expect_close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> float:
    """Return the largest relative difference; raise AssertionError if it exceeds `tolerance`."""
    scale = float(expected.abs().max().clamp_min(1e-12)) if expected.numel() else 1.0
    difference = float((found.to(expected.device).double() - expected.double()).abs().max()) / scale
    expect(
        difference <= tolerance,
        f"{what}: expected a relative difference of at most {tolerance:g}, got {difference:g}",
    )
    return difference


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD, which, unlike Adam, reveals a wrong gradient scale."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def milliseconds(context: Context, call: Callable[[], object], repeats: int = 20) -> float:
    """Return the median duration of a call in milliseconds, including the wait for the device."""
    times = []
    for _ in range(repeats + 3):
        context.synchronize()
        began = time.perf_counter()
        call()
        context.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * sorted(times[3:])[repeats // 2]


def peak_mib(context: Context) -> float:
    """Return the peak memory of torch's allocator since `reset_peak`, in MiB; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(context.device) / 2**20 if context.on_cuda else 0.0


def reset_peak(context: Context) -> None:
    """Reset the peak that `peak_mib` returns."""
    if context.on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(context.device)
