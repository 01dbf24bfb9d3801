"""The input of the planner: a workload and a machine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from farandole.layout import Layout
from farandole.memory.disk import Bandwidth
from farandole.memory.recompute import apply_recompute
from farandole.mesh import Mesh
from farandole.models.meta import meta_device
from farandole.parallel.axes import Layouts, Position, Sent
from farandole.parallel.lora import add_lora
from farandole.parallel.parallelize import apply_axes
from farandole.parallel.pipeline import apply as pipeline
from farandole.parallel.precision import TYPES
from farandole.parallel.zero.sharding import box_mesh
from farandole.plan import MODEL_AXES, LoRA, Plan, PlanError
from farandole.planner.repeats import find_runs
from farandole.planner.trace import Trace, trace

PROCESS_BYTES = 225 << 20
LIBRARY_BYTES = 110 << 20
"""Bytes used by a rank on a CPU host after one step of a tiny model (torch 2.13, Linux).

`PROCESS_BYTES` are private pages, and `LIBRARY_BYTES` are library pages, which all ranks of the host share.  `farandole
plan` measures both.
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The memory and the speeds of each rank when all ranks of a machine compute.

    Args:
        memory: the bytes that a rank may use: the memory of its accelerator, or its share of the host's memory.
        flops: floating-point operations per second in matrix products, by precision ("fp32", "bf16", "fp16").
        stream: bytes per second that other operations read and write.
        bandwidth: bytes per second between ranks, defined as the bus bandwidth of nccl-tests.
        host_bandwidth: bytes per second between a rank and other hosts, such as the bandwidth of its network adapter;
            None if `bandwidth` also applies between hosts.
        host_link: bytes per second between an accelerator and the memory of its host.
        disk: the disk bandwidth of a host, shared by its ranks; None for a machine without a disk.
        process, libraries: the bytes of private pages of a process without a model, and the bytes of file pages that
            all ranks of a host share.
        hosts: the number of hosts, with the same number of ranks on each.
        shared: whether the ranks of a host share memory, so that they keep only one copy of identical weights.
        overlap: whether communication overlaps computation; False if the same cores run both.
        host: whether `memory` is host memory, which also stores checkpoint copies and states offloaded to the host.

    Raises:
        ValueError: if the memory or a speed is not above 0.
    """

    memory: int
    flops: Mapping[str, float] = field(default_factory=lambda: {"fp32": 50e9, "bf16": 50e9, "fp16": 50e9})
    stream: float = 8e9
    bandwidth: float = 2e9
    host_bandwidth: float | None = None
    host_link: float = 12e9
    disk: Bandwidth | None = None
    process: int = PROCESS_BYTES
    libraries: int = LIBRARY_BYTES
    hosts: int = 1
    shared: bool = True
    overlap: bool = False
    host: bool = True

    def __post_init__(self) -> None:
        for name in ("memory", "stream", "bandwidth", "host_bandwidth", "host_link"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"expected Machine({name}=) to be above 0, got {getattr(self, name)}")
        for name, speed in self.flops.items():
            if speed <= 0:
                raise ValueError(
                    f"expected all speeds in Machine(flops=) to be above 0, got {name!r}: {speed}"
                )

    def host_of(self, rank: int, ranks: int) -> int:
        """Return the index of the host of `rank`, if `ranks` ranks are divided equally among the hosts."""
        return rank * self.hosts // ranks

    def members_by_host(self, members: Sequence[int], ranks: int) -> dict[int, list[int]]:
        """Return a dict that maps the index of each host (see `host_of`) to its ranks among `members`."""
        found: dict[int, list[int]] = {}
        for member in members:
            found.setdefault(self.host_of(member, ranks), []).append(member)
        return found

    def bandwidth_among(self, members: Sequence[int], ranks: int, sent_fraction: float = 1.0) -> float:
        """Return the bus bandwidth of a group of ranks.

        On one host, the result is `bandwidth`.  Between hosts, it is also limited to `host_bandwidth` times the
        smallest number of members on a host, because these members divide the traffic to other hosts among
        themselves.

        Args:
            sent_fraction: the fraction of the bytes that remains after the compression of traffic between hosts.
        """
        counts = [len(each) for each in self.members_by_host(members, ranks).values()]
        if len(counts) == 1:
            return self.bandwidth
        among_hosts = min(counts) * (self.host_bandwidth or self.bandwidth)
        if max(counts) == 1:  # no bytes are sent within a host
            return min(self.bandwidth, among_hosts) / sent_fraction
        return min(self.bandwidth, among_hosts / sent_fraction)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one rank in a training step.

    Args:
        model, example, loss: the arguments of `saved_bytes`; the example is a micro-batch of one rank.  The model may
            be on the meta device.
        micro_batches: the number of forward and backward passes per rank in a step.
        states: the number of values that the optimizer keeps per parameter (2 for Adam, 1 for momentum).
        checkpoints: whether copies of weights and states are kept in host memory (`farandole train`).
        block_by_block: whether the model is created block by block, never in full (`parallelize` of a model on the meta
            device).
        applied: whether the adapters and the sharding of a plan are already applied to `model`, as in the result of
            `split`.
        mesh, layouts, rank: the mesh, the layouts and the rank of `model`, if ranks have different shards.  By default,
            ranks differ only in their samples.
        sent: the list to which the model's collectives append the number of bytes that the rank sends.
    """

    model: nn.Module
    example: Any
    loss: Callable[[Any], Tensor] | None = None
    micro_batches: int = 1
    states: int = 2
    checkpoints: bool = False
    block_by_block: bool = False
    applied: bool = False
    mesh: Mesh | None = None
    layouts: Mapping[str, Layout] | None = None
    rank: int = 0
    sent: Sent | None = None

    def split(self, plan: Plan, ranks: int, hosts: int = 1) -> Workload:
        """Return the workload of rank 0, with the adapters of `plan` and the rank's shards of the model.

        The model is not divided into stages (`planner.pipeline`).

        Raises:
            PlanError: if the plan is invalid for the model or the number of ranks.
        """
        sizes = plan.sizes(ranks)
        divided = any(sizes[axis] > 1 for axis in ("pipeline", *MODEL_AXES))
        if self.mesh is not None or (plan.lora is None and not divided):
            return replace(self, applied=True)
        model = _without_values(self.model)
        if plan.lora is not None:
            _add_lora(model, plan.lora)
        if not divided:
            return replace(self, model=model, applied=True)
        names = [str(rank * hosts // ranks) for rank in range(ranks)]
        mirrored = plan.pipeline > 1 and pipeline.schedule_of(plan).mirrored
        mesh = box_mesh(ranks, names, data_shard=plan.data_shard, **sizes, mirror=2 if mirrored else 1)
        if plan.pipeline > 1:
            pipeline.check(model, plan)
        layouts, sent = Layouts(model), Sent()
        position = Position(mesh, mesh.of_rank(0)[0], sent=sent)
        apply_axes(model, position, plan, layouts)
        return replace(self, model=model, applied=True, mesh=mesh, layouts=layouts, sent=sent)

    def trace(self, plan: Plan) -> Trace:
        """Trace a forward and backward pass with the recomputation of `plan`, and then turn recomputation off."""
        needs_example = plan.recompute in ("selective", "attention", "auto")
        dtype = weight_type(plan)

        def recompute() -> None:
            try:
                apply_recompute(
                    self.model,
                    plan.recompute,
                    example=self.example if needs_example else None,
                    loss=self.loss if plan.recompute == "auto" else None,
                    budget_bytes=plan.activation_bytes,
                    dtype=dtype,
                )
            except ValueError as error:
                raise PlanError(str(error).replace("budget_bytes", "activation_bytes")) from error

        try:
            return trace(
                self.model,
                self.example,
                loss=self.loss,
                dtype=dtype,
                scaled=self.micro_batches > 1 or plan.precision == "fp16",
                prepare=recompute,
                runs=[]
                if plan.recompute == "auto"
                else find_runs(self.model),  # the budget is for all blocks
                sent=self.sent,
            )
        finally:
            apply_recompute(self.model, "none")


def _add_lora(model: nn.Module, lora: LoRA) -> None:
    if lora.base is not None:
        raise PlanError(
            f"lora.base={lora.base!r}: the planner does not support quantized weights; nearest plan: base=None"
        )
    try:
        with meta_device():
            add_lora(model, lora)
    except ValueError as error:
        raise PlanError(str(error)) from error


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy of `model` whose parameters and buffers are on the meta device."""
    meta_copies: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    meta_copies |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return copy.deepcopy(model, meta_copies)


def weight_type(plan: Plan) -> torch.dtype | None:
    """Return the dtype of the weights under `plan`; None if dtypes do not change."""
    return None if plan.precision == "fp32" else TYPES[plan.precision]
