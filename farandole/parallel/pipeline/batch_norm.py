"""Update the running statistics of BatchNorm layers independently of the schedule.

Each micro-batch is normalized with its own statistics.  The running statistics, which are used during evaluation, are
updated at the end of a step, from the statistics of all micro-batches:

- By default, once per micro-batch, in the order of the micro-batches.  The result is the same as in one process that
  runs the micro-batches one after another.
- With deferred statistics, once per step, with the mean and the variance over all samples of the step, on all ranks of
  the data axis.  The running statistics then do not depend on the number of micro-batches (Kim et al., 2020,
  "torchgpipe", section 3.3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from farandole.comm.communicator import Communicator
from farandole.memory.recompute import recomputing


@dataclass(frozen=True)
class _Statistics:
    """The statistics of one call to a layer: number of values per channel, mean and unbiased variance."""

    count: int
    mean: Tensor
    variance: Tensor


def tracking_layers(module: nn.Module) -> list[_NormBase]:
    """Return the layers with running statistics in `module`."""
    return [
        layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.running_mean is not None
    ]


class BatchNormStatistics:
    """Records the statistics of a step, and updates the running statistics of this rank's stages.

    Args:
        layers: a dict that maps each stage of this rank to the stage's layers with running statistics.
        mirror: in a mirrored schedule, the communicator of the ranks that hold the same stages, in either replica.
        replicas: for deferred statistics, the communicator of all ranks that run the same stages on different samples.
        deferred: whether to update running statistics once per step instead of once per micro-batch.
    """

    def __init__(
        self,
        layers: Mapping[int, Sequence[_NormBase]],
        mirror: Communicator | None,
        replicas: Communicator | None,
        *,
        deferred: bool,
    ) -> None:
        self._layers = {stage: layers[stage] for stage in sorted(layers) if layers[stage]}
        self._mirror, self._replicas, self._deferred = mirror, replicas, deferred
        self._micro_batch: int | None = None
        self._records: dict[_NormBase, dict[int, list[_Statistics]]] = defaultdict(dict)
        self._kept: list[tuple[Any, ...]] = []
        self._hooks = []
        for layer in self._all():
            self._hooks.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(self._after, always_call=True))

    def close(self) -> None:
        """Remove the hooks from the layers."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        """Return a context manager that records the statistics of `micro_batch` in training mode."""
        self._micro_batch = micro_batch
        try:
            yield
        finally:
            self._micro_batch = None

    def discard(self) -> None:
        """Discard the statistics of a step that has failed."""
        self._records = defaultdict(dict)

    @torch.no_grad()
    def update(self) -> list[Tensor]:
        """Update the running statistics at the end of a step.

        All ranks with the same stages must call this method.

        Returns:
            The buffers with deferred statistics, which are now equal on all ranks with the same stages.
        """
        records, self._records = self._records, defaultdict(dict)
        once = [layer for layer in self._all() if self._deferred and isinstance(layer, _BatchNorm)]
        self._update_once(once, records)
        in_order = [layer for layer in self._all() if layer not in once]
        found = [records[layer] for layer in in_order]
        if self._mirror is not None and found:
            every = self._mirror.all_gather_object(found)
            found = [
                {m: calls for each in same for m, calls in each.items()} for same in zip(*every, strict=True)
            ]
        for layer, by_micro_batch in zip(in_order, found, strict=True):
            for m in sorted(by_micro_batch):
                for statistics in by_micro_batch[m]:
                    _move(layer, statistics.mean, statistics.variance)
        return [buffer for layer in once for buffer in layer.buffers(recurse=False)]

    def _update_once(
        self, layers: Sequence[_NormBase], records: Mapping[_NormBase, Mapping[int, Sequence[_Statistics]]]
    ) -> None:
        if not layers:
            return
        sums = []
        for layer in layers:
            calls = [statistics for each in records[layer].values() for statistics in each]
            assert layer.running_mean is not None
            mean = layer.running_mean.double()
            count, first, second = mean.new_zeros(1), torch.zeros_like(mean), torch.zeros_like(mean)
            for each in calls:
                squares = each.variance.double() * (each.count - 1) / each.count + each.mean.double() ** 2
                count += each.count
                first += each.count * each.mean.double()
                second += each.count * squares
            sums += [count, first, second]
        total = torch.cat(sums)
        if self._replicas is not None:
            self._replicas.all_reduce(total)
        parts = iter(total.split([len(each) for each in sums]))
        for layer, count, first, second in zip(layers, parts, parts, parts, strict=True):
            if count > 0:
                mean = first / count
                _move(layer, mean, (second / count - mean**2).clamp(min=0) * count / (count - 1).clamp(min=1))

    def _all(self) -> Iterator[_NormBase]:
        for layers in self._layers.values():
            yield from layers

    # ---- hooks of layers: during a call, the running statistics are replaced by those of the call ----

    def _before(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert isinstance(layer, _NormBase)
        if self._micro_batch is None or not layer.training or recomputing():
            return
        assert layer.running_mean is not None
        assert layer.running_var is not None
        buffers = dict(layer._buffers)
        (x,) = (*inputs, *named.values())
        self._kept.append((layer, buffers, layer.momentum, x))
        layer._buffers |= {
            name: torch.zeros_like(buffer)
            for name, buffer in buffers.items()
            if name in ("running_mean", "running_var", "num_batches_tracked") and buffer is not None
        }
        layer.momentum = 1.0  # the running statistics become those of this call

    def _after(self, layer: nn.Module, _: Any, output: Any) -> None:
        if not self._kept or self._kept[-1][0] is not layer:
            return
        assert isinstance(layer, _NormBase)
        _, buffers, layer.momentum, x = self._kept.pop()
        mean, variance = layer._buffers["running_mean"], layer._buffers["running_var"]
        layer._buffers.update(buffers)
        if output is None or self._micro_batch is None:  # the call failed
            return
        assert mean is not None
        assert variance is not None
        statistics = _Statistics(x.numel() // len(mean), mean, variance)
        self._records[layer].setdefault(self._micro_batch, []).append(statistics)


def _move(layer: _NormBase, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics of `layer` as a forward pass in training mode does."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share = 1 / int(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.mul_(1 - share).add_(mean.to(layer.running_mean), alpha=share)
    layer.running_var.mul_(1 - share).add_(variance.to(layer.running_var), alpha=share)
