"""Batch normalization with statistics from all ranks."""

# mypy: disable-error-code="no-untyped-call,override"
# torch.autograd.Function: `apply` is untyped, and the arguments of `forward` differ from the base class

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from farandole.horovod.process_sets import ProcessSet, global_process_set
from farandole.horovod.torch.operations import Sum, allgather_async, allreduce_async_, synchronize


class SyncBatchNorm(_BatchNorm):
    """Batch normalization in which the training statistics include the samples on all ranks.

    Input and output have the shape (N, C, ...) with C = num_features.  N may differ between ranks.  The weight and bias
    gradients are not reduced across ranks; a distributed optimizer reduces them.

    Args:
        num_features: The number of channels.
        eps: A constant added to the variance.
        momentum: The weight of a batch in the running statistics, or None to average over all batches.
        affine: Whether the layer has a weight and a bias.
        track_running_stats: Whether the layer has running statistics.
        process_set: The participating ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels in dimension 1, got shape {list(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch.  During training, all ranks in the process set must call this method.

        Raises:
            ValueError: if the input has an invalid shape, or all ranks together have fewer than two values per channel.
        """
        self._check_input_dim(input)
        alone = self._process_set.size() == 1
        if alone or not (self.training or self.running_mean is None):
            return super().forward(input)
        factor = self._average_factor()
        normalized, mean, variance, count = _Normalize.apply(
            input, self.weight, self.bias, self.eps, self._process_set
        )
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        result: Tensor = normalized
        return result

    def _average_factor(self) -> float:
        """Count this batch, and return its weight in the running statistics."""
        if not self.training or self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class _Normalize(torch.autograd.Function):
    """An autograd function that normalizes a batch with the statistics of the samples on all ranks."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, where: ProcessSet
    ) -> Any:
        channels = input.shape[1]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        others = [dim for dim in range(input.dim()) if dim != 1]
        count = input.numel() // channels if channels else 0
        mean = (
            wide.mean(others, dtype=torch.float64) if count else wide.new_zeros(channels, dtype=torch.float64)
        )
        squares = (wide - _per_channel(mean.to(wide.dtype), input)).square().sum(others, dtype=torch.float64)
        own = torch.cat([mean.new_tensor([count]), mean, squares])
        name = f"sync_batch_norm.{channels}.statistics"
        gathered = synchronize(allgather_async(own[None], name, where))
        counts, means, sums = gathered.split([1, channels, channels], 1)
        total = counts.sum()
        if total <= 1:
            raise ValueError(f"expected more than 1 value per channel across all ranks, got {int(total)}")
        # combine the ranks' statistics in float64 (Chan, Golub and LeVeque, 1979)
        mean = (counts * means).sum(0) / total
        variance = (sums + counts * (means - mean).square()).sum(0) / total
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(input, weight, mean, scale)
        ctx.where, ctx.total = where, float(total)
        normalized = (wide - _per_channel(mean.to(wide.dtype), input)) * _per_channel(
            scale.to(wide.dtype), input
        )
        if weight is not None:
            normalized = normalized * _per_channel(weight, input)
        if bias is not None:
            normalized = normalized + _per_channel(bias, input)
        ctx.mark_non_differentiable(mean, variance, total)
        return normalized.to(input.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: Any) -> Any:
        input, weight, mean, scale = ctx.saved_tensors
        channels = input.shape[1]
        others = [dim for dim in range(input.dim()) if dim != 1]
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        deviation = (input.to(wide.dtype) - _per_channel(mean.to(wide.dtype), input)) * _per_channel(
            scale.to(wide.dtype), input
        )
        for_bias = wide.sum(others, dtype=torch.float64)
        for_weight = (wide * deviation).sum(others, dtype=torch.float64)
        name = f"sync_batch_norm.{channels}.gradients"
        sums = synchronize(
            allreduce_async_(torch.cat([for_bias, for_weight]), name=name, op=Sum, process_set=ctx.where)
        )
        shared_bias, shared_weight = (sums / ctx.total).to(wide.dtype).split(channels)
        inner = wide - _per_channel(shared_bias, input) - deviation * _per_channel(shared_weight, input)
        factor = scale.to(wide.dtype) if weight is None else scale.to(wide.dtype) * weight
        for_input = (inner * _per_channel(factor, input)).to(input.dtype)
        if weight is None:
            return for_input, None, None, None, None
        return for_input, for_weight.to(weight.dtype), for_bias.to(weight.dtype), None, None


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """Reshape a vector of C values so that it broadcasts to (N, C, ...)."""
    return vector.view(1, -1, *[1] * (like.dim() - 2))
