"""Stochastic rounding: train bf16 weights without fp32 master weights.

bf16 has 8 bits of precision, so rounding to nearest loses every update below 1/512 of a weight.  Stochastic rounding
rounds up with a probability proportional to the distance from the next lower number.  Its result is exact in
expectation, so small updates add up (Gupta et al., 2015, "Deep Learning with Limited Numerical Precision"; for training
in bf16: Zamirai et al., 2020, "Revisiting BFloat16 Training").

Master weights, which take 4 bytes per parameter, are not stored: an update converts the weights of one bucket at a time
to fp32, and rounds the updated weights to bf16.  The optimizer computes in fp32, and its states are fp32.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farandole.memory.divided_step import divided_step, replace_step
from farandole.parallel.optimizers.shards import OptimizerShards

_CHUNK = 1 << 16
"""The number of elements that are rounded at a time on a CPU, so that they stay in its cache."""


def round_stochastically(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """Round `source` (fp32, flat, contiguous) stochastically to bf16 in `target` (same length).

    `source` is overwritten.  A value between two bf16 numbers is rounded up with a probability proportional to its
    distance from the lower number.  Infinities, NaNs and numbers that bf16 represents exactly are unchanged.
    """
    wrong: Tensor | None = None
    if not math.isfinite(torch.linalg.vector_norm(source)):  # otherwise all values are finite
        wrong = ~source.isfinite()
        kept = source[wrong].to(target.dtype)  # the sum below could turn a NaN into a number
        source = source.masked_fill(wrong, 0.0)
    length = _CHUNK if source.device.type == "cpu" else max(1, source.numel())
    for rounded, exact in zip(target.split(length), source.split(length), strict=True):
        count = exact.numel()
        noise = torch.empty(-(-count // 4), dtype=torch.int64, device=exact.device)
        noise.random_(-(1 << 63), None, generator=generator)  # 16 random bits for each element
        bits = exact.view(torch.int32)
        # the sum of the two terms is in [0, 65535]; torch is slow with mixed dtypes
        bits.add_(noise.view(torch.int16)[:count].int()).add_(1 << 15)
        rounded.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
    if wrong is not None:
        target[wrong] = kept


class StochasticRounding:
    """Makes an optimizer update bf16 weights with stochastic rounding, one bucket at a time.

    The random number for a weight depends only on `seed`, on `steps` (the number of steps so far) and on the weight's
    position: the name of the bucket's first parameter, the index of the shard and the index in the shard.  Therefore
    ranks that update the same weights round them identically, even if their other buckets differ.  A resumed run
    also rounds identically if the checkpoint contains the weights, the optimizer's state and `steps`.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.steps = 0

    def drive(self, optimizer: Optimizer, shards: Sequence[OptimizerShards]) -> None:
        """Make `optimizer.step()` update the buckets one by one.

        The optimizer's hooks are called once per step, not once per bucket.
        """
        replace_step(optimizer, lambda: self._step(optimizer, shards))

    def _step(self, optimizer: Optimizer, shards: Sequence[OptimizerShards]) -> None:
        whole = optimizer.param_groups
        group_of = {id(tensor): number for number, group in enumerate(whole) for tensor in group["params"]}
        changed: dict[int, dict[str, Any]] = {}
        try:
            with divided_step(optimizer) as step_part:
                for bucket in shards:
                    members: dict[int, list[Tensor]] = {}
                    for tensor in bucket.tensors:
                        if tensor is not None and tensor.grad is not None and id(tensor) in group_of:
                            members.setdefault(group_of[id(tensor)], []).append(tensor)
                    if not members:
                        continue
                    groups = {at: {**whole[at], "params": params} for at, params in sorted(members.items())}
                    optimizer.param_groups = list(groups.values())
                    with self._masters(bucket):
                        step_part()
                    changed |= groups
        finally:
            optimizer.param_groups = whole
        for at, group in changed.items():  # an optimizer may count steps in its groups
            whole[at].update({key: value for key, value in group.items() if key != "params"})
        self.steps += 1

    @contextmanager
    def _masters(self, bucket: OptimizerShards) -> Iterator[None]:
        """Replace the tensors of `bucket` with fp32 copies; on exit, round the copies to bf16 weights."""
        assert bucket.weights is not None  # weights were cast to bf16
        own = bucket.weights.shard
        if own.dtype is not torch.bfloat16:  # the engine keeps the parameters of BatchNorm in fp32
            with bucket.placed_in(own):
                yield
            return
        master = own.float()
        with bucket.placed_in(master):
            yield
            round_stochastically(own, master, self._generator(bucket, own.device))

    def _generator(self, bucket: OptimizerShards, device: torch.device) -> torch.Generator:
        # ranks number their buckets differently, but ranks with the same bucket know it by the same name
        name = bucket.bucket.plan.names[0].encode()
        words = struct.pack("<3Q", self.seed % 2**64, self.steps, bucket.number) + name
        digest = hashlib.blake2b(words, digest_size=4).digest()  # torch's generator on the CPU takes 32 bits
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
