"""Stochastic rounding: bf16 weights that learn without fp32 masters.

bf16 has 8 bits of precision, so that an update below 1/256 of a weight is lost when it is rounded to the nearest
number, again at each step.  Rounded up with the probability of its distance to the number below, a weight is right in
expectation, and small updates add up (Gupta et al., 2015, "Deep Learning with Limited Numerical Precision"; for
training in bf16: Zamirai et al., 2020, "Revisiting BFloat16 Training").

So no masters are kept, which are 4 bytes per parameter: they are made of the weights for the update, one bucket at a
time, and rounded back.  The optimizer computes in fp32, and its states are fp32.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farandole.parallel.optimizer_shards import OptimizerShards

_CHUNK = 1 << 16
"""Elements that are rounded at a time on a CPU, where they stay in its cache."""


def round_stochastically(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """Round `source` (fp32, flat, contiguous) to `target` (bf16, as long); `source` holds nothing useful after.

    A value between two numbers of bf16 becomes the upper one with the probability of its distance from the lower,
    and a number of bf16 stays what it is.  Infinities and NaNs are kept.
    """
    wrong: Tensor | None = None
    if not math.isfinite(torch.linalg.vector_norm(source)):  # else there is nothing to look for
        wrong = ~source.isfinite()
        kept = source[wrong].to(target.dtype)  # the sum below could make numbers of NaNs
        source = source.masked_fill(wrong, 0.0)
    length = _CHUNK if source.device.type == "cpu" else max(1, source.numel())
    for rounded, exact in zip(target.split(length), source.split(length), strict=True):
        count = exact.numel()
        noise = torch.empty(-(-count // 4), dtype=torch.int64, device=exact.device)
        noise.random_(-(1 << 63), None, generator=generator)  # every bit of it is random: 16 for each element
        bits = exact.view(torch.int32)
        # in all 0 to 65535 is added; torch is slow where types are mixed
        bits.add_(noise.view(torch.int16)[:count].int()).add_(1 << 15)
        rounded.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
    if wrong is not None:
        target[wrong] = kept


class StochasticRounding:
    """Has an optimizer update the bf16 weights of buckets.

    What is rounded up depends on `seed`, on how many `steps` were made and on the place of a weight, and on nothing
    else: it is the same on ranks that update the same weights, and in a run that goes on from a checkpoint of the
    weights, the optimizer's state and `steps`.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.steps = 0

    def drive(self, optimizer: Optimizer, shards: Sequence[OptimizerShards]) -> None:
        """Have `optimizer.step()` update the buckets one by one.

        Its hooks are called once for all buckets.
        """
        cls: Any = type(optimizer)
        # torch wraps the method of every class of optimizers, to call hooks and to profile it
        plain: Callable[[Optimizer], Any] = getattr(cls.step, "__wrapped__", cls.step)

        def step(self_: Optimizer) -> None:
            self._step(self_, plain, shards)

        # a bound method, as torch's schedulers want it
        optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]

    def _step(
        self, optimizer: Optimizer, plain: Callable[[Optimizer], Any], shards: Sequence[OptimizerShards]
    ) -> None:
        whole = optimizer.param_groups
        group_of = {id(piece): number for number, group in enumerate(whole) for piece in group["params"]}
        changed: dict[int, dict[str, Any]] = {}
        try:
            for number, bucket in enumerate(shards):
                members: dict[int, list[Tensor]] = {}
                for piece in bucket.tensors:
                    if piece is not None and piece.grad is not None and id(piece) in group_of:
                        members.setdefault(group_of[id(piece)], []).append(piece)
                if not members:
                    continue
                groups = {at: {**whole[at], "params": params} for at, params in sorted(members.items())}
                optimizer.param_groups = list(groups.values())
                with self._masters(bucket, number):
                    plain(optimizer)
                changed |= groups
        finally:
            optimizer.param_groups = whole
        for at, group in changed.items():  # an optimizer may count steps in its groups
            whole[at].update({key: value for key, value in group.items() if key != "params"})
        self.steps += 1

    @contextmanager
    def _masters(self, bucket: OptimizerShards, number: int) -> Iterator[None]:
        """The bucket's pieces are fp32 within, and rounded at its end."""
        assert bucket.weights is not None  # there is a type that the weights were cast to
        own = bucket.weights.shard
        master = own.float()
        with bucket.placed_in(master):
            yield
            round_stochastically(own, master, self._generator(number, bucket.number, own.device))

    def _generator(self, number: int, shard: int, device: torch.device) -> torch.Generator:
        words = struct.pack("<4Q", self.seed % 2**64, self.steps, number, shard)
        digest = hashlib.blake2b(words, digest_size=4).digest()  # torch's generator on the CPU takes 32 bits
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
