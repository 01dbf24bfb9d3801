"""The planner's input: a workload and a machine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from farandole.layout import Layout
from farandole.memory.disk import Bandwidth
from farandole.memory.recompute import apply_recompute
from farandole.mesh import Mesh
from farandole.parallel.axes import Layouts, Position
from farandole.parallel.parallelize import APPLIED
from farandole.parallel.precision import TYPES
from farandole.parallel.zero.sharding import box_mesh
from farandole.plan import MODEL_AXES, Plan, PlanError
from farandole.planner.trace import Trace, trace

PROCESS_BYTES = 225 << 20
LIBRARY_BYTES = 110 << 20
"""Bytes used by a rank on a CPU host after one step of a tiny model (torch 2.13, Linux).

`PROCESS_BYTES` are private pages, and `LIBRARY_BYTES` are library pages, which all ranks of the host share.  `farandole
plan` measures both.
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One rank's share of a machine while all ranks compute.

    Args:
        memory: bytes that a rank may use: the memory of its accelerator, or its share of the host's memory.
        flops: floating-point operations per second in matrix products, by precision ("fp32", "bf16", "fp16").
        stream: bytes per second that other operations read and write.
        bandwidth: bytes per second between ranks, defined as the bus bandwidth of nccl-tests.
        host_link: bytes per second between an accelerator and the memory of its host.
        disk: the disk bandwidth of a host, shared by its ranks; None for a machine without a disk.
        process, libraries: bytes of a process without a model: its private pages, and the file pages shared by all
            ranks of a host.
        hosts: the number of hosts, with the same number of ranks on each.
        shared: whether the ranks of a host share memory, and so keep one copy of identical weights.
        overlap: whether communication overlaps computation; False if the same cores run both.
        host: whether `memory` is host memory, which also stores checkpoint copies and states offloaded to the host.
    """

    memory: int
    flops: Mapping[str, float] = field(default_factory=lambda: {"fp32": 50e9, "bf16": 50e9, "fp16": 50e9})
    stream: float = 8e9
    bandwidth: float = 2e9
    host_link: float = 12e9
    disk: Bandwidth | None = None
    process: int = PROCESS_BYTES
    libraries: int = LIBRARY_BYTES
    hosts: int = 1
    shared: bool = True
    overlap: bool = False
    host: bool = True

    def __post_init__(self) -> None:
        for name in ("memory", "stream", "bandwidth", "host_link"):
            if getattr(self, name) <= 0:
                raise ValueError(f"expected Machine({name}=) to be above 0, got {getattr(self, name)}")
        for name, speed in self.flops.items():
            if speed <= 0:
                raise ValueError(
                    f"expected all speeds in Machine(flops=) to be above 0, got {name!r}: {speed}"
                )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One rank's part of a training step.

    Args:
        model, example, loss: as for `saved_bytes`; the example is a micro-batch of one rank.  The model may be on the
            meta device.
        micro_batches: forward and backward passes per rank in a step.
        states: values that the optimizer keeps per parameter (2 for Adam, 1 for momentum).
        checkpoints: whether copies of weights and states are kept in host memory (`farandole train`).
        block_by_block: whether the model is created block by block, never in full (`parallelize` of a model on the meta
            device).
        sent: the bytes that the rank sends in collectives of the model, filled by `trace`.
        mesh, layouts, rank: if ranks have different parts of a model, the mesh, the layouts, and the rank that has
            `model`.  By default, ranks differ only in their samples.
    """

    model: nn.Module
    example: Any
    loss: Callable[[Any], Tensor] | None = None
    micro_batches: int = 1
    states: int = 2
    checkpoints: bool = False
    block_by_block: bool = False
    mesh: Mesh | None = None
    layouts: Mapping[str, Layout] | None = None
    rank: int = 0
    sent: list[float] | None = None

    def split(self, plan: Plan, ranks: int, hosts: int = 1) -> Workload:
        """Return the workload of rank 0, with its shards of the model, if the plan has axes that split the model.

        A sequence that `plan.context` ranks share is traced as a shorter sequence, without the exchange of keys.

        Raises:
            PlanError: if the plan is invalid for the model or the number of ranks.
        """
        sizes = plan.sizes(ranks)
        if plan.pipeline > 1:
            raise PlanError(
                f"pipeline={plan.pipeline}: the planner predicts no pipelines; nearest plan: pipeline=1 (`farandole schedule` "
                "simulates schedules)"
            )
        if all(sizes[axis] == 1 for axis in MODEL_AXES):
            return self
        names = [str(rank * hosts // ranks) for rank in range(ranks)]
        mesh = box_mesh(ranks, names, hybrid=plan.hybrid, **sizes)
        model = _without_values(self.model)
        layouts, sent = Layouts(model), list[float]()
        position = Position(mesh, mesh.of_rank(0)[0], sent=sent)
        for apply in APPLIED:
            apply(model, position, plan, layouts)
        example = tree_map_only(Tensor, partial(_shortened, ranks=plan.context), self.example)
        return replace(self, model=model, mesh=mesh, layouts=layouts, example=example, sent=sent)

    def trace(self, plan: Plan) -> Trace:
        """Trace a forward and backward pass with the recomputation of `plan`, then switch recomputation off."""
        if self.sent is not None:
            self.sent.clear()
        needs_example = plan.recompute in ("selective", "attention", "auto")
        dtype = weight_type(plan)
        try:
            apply_recompute(
                self.model,
                plan.recompute,
                example=self.example if needs_example else None,
                loss=self.loss if plan.recompute == "auto" else None,
                budget_bytes=plan.activation_bytes,
                dtype=dtype,
            )
            return trace(
                self.model,
                self.example,
                loss=self.loss,
                dtype=dtype,
                scaled=self.micro_batches > 1 or plan.precision == "fp16",
            )
        finally:
            apply_recompute(self.model, "none")


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device."""
    twins: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    twins |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return copy.deepcopy(model, twins)


def _shortened(tensor: Tensor, ranks: int) -> Tensor:
    """Return one rank's share of the positions in a tensor (batch, positions)."""
    return tensor[:, : -(-tensor.shape[1] // ranks)] if ranks > 1 and tensor.dim() == 2 else tensor


def weight_type(plan: Plan) -> torch.dtype | None:
    """Return the dtype of the weights under `plan`; None if dtypes do not change."""
    return None if plan.precision == "fp32" else TYPES[plan.precision]
