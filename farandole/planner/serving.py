"""Predict the memory and the speed of a generation engine that serves a model.

    part = ServedPart.of(model, tensor=2, precision="bf16")
    estimate_serving(part, machine, Mix(prompt=512, output=128), running=16).tokens_per_s

A step computes one token of each running sequence, and the prompts of new sequences.  The time of a step is the sum of:

products       matrix products, each of which reads its weights once for all rows of the step
attention      reading the keys and values of all running sequences
communication  with tensor parallelism, all-reduces of the hidden states of all tokens, several per layer
overhead       a constant time per step, per layer and per sequence

In the steady state, as many sequences start as end.  With B running sequences and outputs of N tokens, a replica
therefore runs N steps and computes B prompts during the lifetime of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from farandole.memory.dry_run import device_of, fake_model
from farandole.models.moe import MixtureOfExperts
from farandole.models.sequence import KeyValueCache, SequenceInfo, Transformer
from farandole.parallel.precision import TYPES
from farandole.parallel.tensor import sharded_logits
from farandole.plan import Plan, PlanError
from farandole.planner.workload import Workload

PAGE = 16
"""The number of positions by which the KV cache of a sequence grows."""
ACCELERATOR_LATENCY_S = 10e-6
"""The assumed time in seconds of a small all-reduce between the accelerators of a host."""


@dataclass(frozen=True, kw_only=True)
class ServingMachine:
    """The memory and the speeds of each rank, measured while all ranks of a machine are busy.

    Args:
        memory: the number of bytes that a rank may use.
        products: a dict that maps a precision to points (rows, seconds per weight of a matrix product), in ascending
            order of rows.  Between the points, the time is interpolated linearly.  Above the last point, it is
            proportional to the number of rows.
        read: the rate in bytes per second at which attention reads keys and values.
        flops: a dict that maps a precision to the speed of attention during prefill, in floating-point operations per
            second.
        bandwidth: the bandwidth between ranks in bytes per second, defined as the bus bandwidth of nccl-tests.
        latency: the duration in seconds of an all-reduce of a few bytes.
        step, layer, sequence: the constant overhead in seconds per step, per layer in a step, and per sequence in a
            step.
        process: the number of bytes that a process without a model uses.
        copies: a dict that maps a precision to the number of copies of each matrix-product weight in memory.
    """

    memory: int
    products: Mapping[str, Sequence[tuple[int, float]]]
    read: float
    flops: Mapping[str, float]
    bandwidth: float
    latency: float = 0.0
    step: float = 0.0
    layer: float = 0.0
    sequence: float = 0.0
    process: int = 0
    copies: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_accelerator(
        cls, *, memory: int, flops: Mapping[str, float], read: float, bandwidth: float, process: int
    ) -> ServingMachine:
        """Create a `ServingMachine` from the published speeds of an accelerator.

        The time of a matrix product is the larger of the time to read its weights and the time to compute it.
        """
        products = {}
        for name in ("fp32", "bf16", "fp16"):
            reading = TYPES[name].itemsize / read
            knee = max(1, int(reading * flops[name] / 2))
            products[name] = [(knee, reading), (knee + 1, 2 * (knee + 1) / flops[name])]
        return cls(
            memory=memory,
            products=products,
            read=read,
            flops=flops,
            bandwidth=bandwidth,
            latency=ACCELERATOR_LATENCY_S,
            process=process,
        )

    def product_s(self, precision: str, rows: float) -> float:
        """Return the seconds per weight of a matrix product with `rows` rows."""
        points = self.products[precision]
        if rows <= points[0][0]:
            return points[0][1]
        for (before, low), (after, high) in zip(points, points[1:], strict=False):
            if rows <= after:
                return low + (high - low) * (rows - before) / (after - before)
        last, seconds = points[-1]
        return seconds * rows / last


@dataclass(frozen=True)
class Mix:
    """The mean numbers of tokens in the prompts and in the outputs of requests."""

    prompt: int
    output: int

    @property
    def positions(self) -> int:
        """Return the number of KV cache positions of a sequence, rounded up to a multiple of `PAGE`.

        The last token needs no position.
        """
        return -(-(self.prompt + self.output - 1) // PAGE) * PAGE


@dataclass(frozen=True, kw_only=True)
class ServedPart:
    """The size and the work of the model shard that one rank serves.

    Args:
        precision: the precision of weights, keys and values.
        tensor: the number of tensor-parallel ranks.
        layers: the number of attention layers.
        weights: the total number of parameters, including embedding tables, which are not multiplied.
        body: the number of weights that are applied to every token, excluding experts and the output projection.
        experts: the number of weights of all experts.
        expert_count, expert_top: the number of experts per layer, and the number of experts that process a token.
        head: the number of weights of the output projection, which computes the logits of each token.
        kv_bytes: the number of bytes of keys and values per position.
        attention: the floating-point operations of attention per token and position.
        messages: the number of all-reduces in a step.
        sent: the number of bytes that this rank sends per token of a step.
    """

    precision: str
    tensor: int
    layers: int
    weights: int
    body: int
    experts: int
    expert_count: int
    expert_top: int
    head: int
    kv_bytes: int
    attention: int
    messages: int
    sent: float

    @classmethod
    def of(cls, model: Transformer, tensor: int, precision: str) -> ServedPart:
        """Return the size and the work of rank 0's shard of `model`.  The model may be on the meta device.

        Raises:
            PlanError: if the model cannot be sharded over `tensor` ranks; the message contains the nearest valid plans.
        """
        tokens = torch.zeros(1, 1, dtype=torch.int64)
        work = Workload(model=model, example=tokens).split(Plan(tensor=tensor), tensor)
        own: Any = work.model
        probe = _Probe()
        with (
            torch.no_grad(),
            sharded_logits(own),
            fake_model(own, tokens, device_of(own), TYPES[precision]) as fake,
        ):
            own(fake, SequenceInfo(cache=probe))
        moes = [module for module in own[1:-1].modules() if isinstance(module, MixtureOfExperts)]
        experts = sum(_count(each.experts) for each in moes)
        sent = work.sent or []
        return cls(
            precision=precision,
            tensor=tensor,
            layers=probe.layers,
            weights=_count(own),
            body=_count(own[1:-1]) - experts,
            experts=experts,
            expert_count=moes[0].experts.count if moes else 1,
            expert_top=moes[0].router.top if moes else 1,
            head=_count(own[-1]),
            kv_bytes=probe.kv_bytes,
            attention=probe.operations,
            messages=len(sent),
            sent=sum(nbytes for _, nbytes in sent),
        )


class _Probe(KeyValueCache):
    """Counts the keys, values and operations of all attention layers for one token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.kv_bytes = self.operations = 0

    def append(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Count a layer."""
        self.layers += 1
        self.kv_bytes += key.nbytes + value.nbytes
        return key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        """Count the operations, and return zeros."""
        heads = query.shape[1]
        self.operations += 2 * heads * (query.shape[3] + value.shape[3])
        return query.new_zeros(1, heads, query.shape[2], value.shape[3])


@dataclass(frozen=True)
class ServingEstimate:
    """The predicted memory and speed of one replica, computed for the rank with the largest shard.

    Args:
        running: the number of running sequences.
        weight_bytes: the size of the weights in bytes, including copies.
        fits: the maximum number of sequences whose keys and values fit in memory.
        ttft: the seconds from the arrival of a request to its first token, if no other request is waiting.
        tpot: the seconds per output token after the first, while prompts of other requests are computed.
        tokens_per_s: the number of output tokens that the replica generates per second.
        requests_per_s: the number of requests that the replica completes per second.
    """

    part: ServedPart
    running: int
    weight_bytes: int
    fits: int
    ttft: float
    tpot: float
    tokens_per_s: float
    requests_per_s: float


def estimate_serving(
    part: ServedPart, machine: ServingMachine, mix: Mix, running: int, *, token_budget: int = 256
) -> ServingEstimate:
    """Predict the memory and speed of a replica with `running` running sequences.

    Args:
        token_budget: the maximum number of tokens in a step; with 0, the larger of 256 and twice `running`.
    """
    decode = _decode_s(part, machine, mix, running)
    per_step = max(1, (token_budget or max(256, 2 * running)) - running + 1)
    pieces = -(-mix.prompt // per_step)
    prompt = _prompt_s(part, machine, mix.prompt, pieces, running)
    steps = mix.output - 1 + pieces
    total = steps * decode + running * prompt
    waiting = total / steps / 2 if running > 1 else 0.0
    copied = (machine.copies.get(part.precision, 1) - 1) * (part.body + part.experts + part.head)
    weight_bytes = (part.weights + copied) * TYPES[part.precision].itemsize
    return ServingEstimate(
        part,
        running,
        weight_bytes,
        kv_memory(part, machine, weight_bytes) // (mix.positions * part.kv_bytes),
        ttft=waiting + pieces * decode + prompt,
        tpot=decode + (running - 1) * prompt / steps,
        tokens_per_s=running * mix.output / total,
        requests_per_s=running / total,
    )


def kv_memory(part: ServedPart, machine: ServingMachine, weight_bytes: int) -> int:
    """Return the number of bytes of a rank's memory that remain for the KV cache."""
    return max(0, machine.memory - machine.process - weight_bytes)


def _decode_s(part: ServedPart, machine: ServingMachine, mix: Mix, running: int) -> float:
    """Return the seconds that a step needs to decode one token per sequence, halfway through each output."""
    positions = running * (mix.prompt + mix.output / 2)
    attention = max(
        positions * part.kv_bytes / machine.read,
        positions * part.attention / machine.flops[part.precision],
    )
    products = _products_s(part, machine, running) + part.head * machine.product_s(part.precision, running)
    overhead = machine.step + part.layers * machine.layer + running * machine.sequence
    return products + attention + overhead + _communication_s(part, machine, running)


def _prompt_s(part: ServedPart, machine: ServingMachine, tokens: int, pieces: int, running: int) -> float:
    """Return the seconds that a prompt of `tokens` tokens adds to the `pieces` steps that compute it."""
    # without the prompt, its sequence would decode one token in each of these steps
    others = running - 1
    rows = others + tokens / pieces
    products = pieces * (_products_s(part, machine, rows) - _products_s(part, machine, running))
    attention = part.attention * tokens * (tokens + 1) / 2 / machine.flops[part.precision]
    sent = (tokens - pieces) * part.sent / machine.bandwidth
    return max(0.0, products) + attention + sent


def _products_s(part: ServedPart, machine: ServingMachine, rows: float) -> float:
    """Return the seconds that all matrix products except the output projection take in a step with `rows` tokens."""
    dense = part.body * machine.product_s(part.precision, rows)
    if not part.experts:
        return dense
    share = part.expert_top / part.expert_count
    used = 1 - math.pow(1 - share, rows)  # the fraction of the experts that at least one token uses
    return dense + used * part.experts * machine.product_s(part.precision, max(1.0, rows * share / used))


def _communication_s(part: ServedPart, machine: ServingMachine, tokens: float) -> float:
    return part.messages * machine.latency + tokens * part.sent / machine.bandwidth


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def running_choices(most: int) -> list[int]:
    """Return the powers of 4 below `most` (1, 4, 16, ...), followed by `most`.

    Raises:
        PlanError: if `most` is less than 1.
    """
    if most < 1:
        raise PlanError("no sequence fits in the KV cache; use more memory")
    return sorted({*(4**power for power in range(20) if 4**power <= most), most})
