"""Compute losses and metrics on the last stage of a pipeline, and return the mean on all ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.mesh import SAMPLE_AXES, Mesh
from farandole.parallel.agreed_errors import agreed_errors
from farandole.parallel.global_mean import GlobalMean, Loss, Step, scalar_sum
from farandole.parallel.pipeline.runtime import Arguments, Pipeline
from farandole.parallel.pipeline.stage_error import StageError
from farandole.parallel.precision import cast_floating

if TYPE_CHECKING:
    from farandole.parallel.engine import Engine


_log = logging.getLogger(__name__)


class PipelineMean(GlobalMean):
    """Runs micro-batches through the stages of a pipeline; see `GlobalMean`.

    The loss is divided by the total count of the step, which is known only after the forward passes.  Ranks cannot
    exchange counts in the middle of the schedule.  Therefore each step divides by the count of the previous step; the
    first step divides by an estimate.  After the backward passes, the gradients are corrected with the exact count.
    """

    def __init__(self, engine: Engine, mesh: Mesh, pipeline: Pipeline, dtype: torch.dtype | None) -> None:
        super().__init__(engine, mesh)
        self._pipeline, self._dtype = pipeline, dtype
        self._every_pass = engine.reduced_in_every_pass
        self._has_warned = not pipeline.mirrored
        # ranks that compute a stage together have the same loss, which is counted once
        axes = ("pipeline", "mirror", *SAMPLE_AXES)
        own = mesh.of_rank(engine.comm.rank)[0]
        first = min(cell.rank for cell in mesh.cells if cell.at(axes) == own.at(axes))
        self.counts = pipeline.has_loss and first == own.rank

    def forward_backward(self, batches: Iterable[Any], loss: Loss, inputs: Callable[[Any], Any]) -> Step:
        """Run the schedule on all micro-batches; see `Engine.forward_backward`."""
        engine, own_batches = self._engine, list(batches)
        most = self._most(len(own_batches))
        expected = self.expected or self._guess(own_batches, inputs)
        versions = self._buffer_versions()
        try:
            with engine.accumulating(), engine.scaled_backward() as scale:
                factor = self._replicas / expected * scale
                sums, counts = self._run_all(most, own_batches, loss, inputs, train=True, factor=factor)
        except StageError:
            self._pipeline.statistics.discard()
            engine.zero_grad()
            raise
        self._warn_of_changed_buffers(versions)
        engine.accept_buffers(self._pipeline.statistics.update())
        engine.join_backward(last=True)
        mean, count = self._mean(sums, counts)
        if count != expected:
            engine.scale_all(expected / count)
        self.expected = count
        return Step(mean, count, skipped=engine.will_skip())

    def _buffer_versions(self) -> dict[str, int]:
        if self._has_warned:
            return {}
        return {name: buffer._version for name, buffer in self._engine.model.named_buffers()}

    def _warn_of_changed_buffers(self, before: Mapping[str, int]) -> None:
        """Warn once if the forward passes of a mirrored schedule changed buffers other than BatchNorm statistics."""
        now = self._buffer_versions()
        # a buffer that a forward pass creates is usually a cache with equal values on all ranks
        changed = sorted(name for name, version in now.items() if version != before.get(name, version))
        if changed:
            self._has_warned = True
            _log.warning(
                "forward passes changed %s: with two replicas of the model, each replica changes its own copy, and the "
                "copies are averaged after the step, so their values differ from those of one process; use a schedule "
                "with one replica, such as '1f1b'",
                ", ".join(changed[:3])
                + (f" and {len(changed) - 3} other buffers" if len(changed) > 3 else ""),
            )

    def _guess(self, batches: Sequence[Any], inputs: Callable[[Any], Any]) -> float:
        """Estimate the total number of tokens, or of samples for floating-point inputs (collective call)."""
        guess = torch.zeros(1, dtype=torch.float64)
        with agreed_errors(self._comm):
            for batch in batches if self.counts else ():
                arguments, named = self._arguments(inputs(batch))
                first = next(
                    (x for x in (*arguments, *named.values()) if isinstance(x, Tensor) and x.dim()), None
                )
                if first is not None:
                    guess += first.shape[0] if first.is_floating_point() else first.numel()
        self._comm.all_reduce(guess)
        return max(1.0, float(guess))

    def _evaluate(
        self, batches: Sequence[Any], metric: Loss, inputs: Callable[[Any], Any]
    ) -> tuple[list[Tensor], list[Tensor | float]]:
        return self._run_all(self._most(len(batches)), batches, metric, inputs, train=False, factor=1.0)

    def _run_all(
        self,
        most: int,
        batches: Sequence[Any],
        loss: Loss,
        inputs: Callable[[Any], Any],
        *,
        train: bool,
        factor: float,
    ) -> tuple[list[Tensor], list[Tensor | float]]:
        sums: list[Tensor] = []
        counts: list[Tensor | float] = []

        def loss_of(output: Any, number: int) -> Tensor:
            with self._engine.loss_parameters.hidden():
                total, count = scalar_sum(loss(output, batches[number]))
            sums.append(total.detach().double())
            counts.append(count)
            return total * factor

        @functools.cache  # a rank may have several stages
        def arguments_of(number: int) -> Arguments:
            return self._arguments(inputs(batches[number]))

        failure = None
        if most:
            failure = self._pipeline.run(
                most,
                len(batches),
                arguments_of,
                loss_of,
                train=train,
                completing=self._engine.completing,
                every_pass=self._every_pass,
            )
        self._pipeline.raise_on_all(self._comm, failure)
        return sums, counts

    def _arguments(self, given: Any) -> Arguments:
        if self._dtype is not None:
            given = cast_floating(given, self._dtype)
        if isinstance(given, Mapping):
            return (), given
        return (given if isinstance(given, tuple) else (given,)), {}
