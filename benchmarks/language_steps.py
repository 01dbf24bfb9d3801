"""Provide training steps of farandole's language models, to compare parallelism axes with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import farandole
from farandole.comm.communicator import Communicator
from farandole.mesh import Mesh
from farandole.parallel.axes import Layouts, Position
from farandole.plan import Plan

Apply = Callable[[nn.Module, Position, Plan, Layouts], None]
"""A parallelism axis's function that transforms a model."""


def random_batch(
    vocabulary: int, samples: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return random tokens and the tokens that follow them, both (samples, length)."""
    tokens = torch.randint(0, vocabulary, (samples, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all implementations use."""
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def our_step(build: Callable[[], nn.Module], plan: Plan, batch: tuple[Tensor, Tensor]) -> Callable[[], Any]:
    """Return a training step with farandole."""
    torch.manual_seed(0)
    engine = farandole.parallelize(model := build(), plan)
    optimizer = engine.optimizer(adamw(model))

    def step() -> float:
        result = engine.forward_backward(
            [batch], lambda output, _: output, inputs=lambda each: (each[0], None, each[1])
        )
        optimizer.step()
        optimizer.zero_grad()
        return result.loss

    return step


def local_step(
    build: Callable[[], nn.Module],
    apply: Apply,
    plan: Plan,
    comm: Communicator,
    batch: tuple[Tensor, Tensor],
    change: Callable[[nn.Module], None] = lambda model: None,
) -> Callable[[], Any]:
    """Return a training step with this rank's part of a model that an axis of `plan` splits, without communication.

    Args:
        apply: the function of the axis.
        change: a function that changes the split model.
    """
    torch.manual_seed(0)
    model = build()
    sizes: dict[str, Any] = plan.sizes(comm.size)
    mesh = Mesh.box(comm.size, **sizes)
    apply(model, Position(mesh, mesh.of_rank(comm.rank)[0]), plan, Layouts(model))
    change(model)
    optimizer = adamw(model)

    def step() -> float:
        total, count = model(batch[0], None, batch[1])
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(total.detach())

    return step
