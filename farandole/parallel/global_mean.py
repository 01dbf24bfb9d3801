"""Compute mean losses and metrics over all ranks.

Ranks can have different numbers of micro-batches, samples and tokens.  The total count of a step, for example of
tokens, is known only after the last forward pass.  Therefore each loss is divided by the previous step's count before
its backward pass.  If the counts differ, the gradients are rescaled at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.mesh import Mesh, ranks_of
from farandole.plan import MODEL_AXES

if TYPE_CHECKING:
    from farandole.parallel.engine import Engine

Loss = Callable[[Any, Any], tuple[Tensor, Tensor | float]]
"""A function `loss(output, batch)` that returns the sum over a micro-batch and the number of summands."""


@dataclass(frozen=True)
class Step:
    """The result of `Engine.forward_backward`, equal on all ranks.

    Args:
        loss: the mean loss over all ranks.
        count: the total number of summands in the mean, for example of tokens.
        skipped: whether the optimizer will skip the step because fp16 gradients overflowed; False with other
            precisions.
    """

    loss: float
    count: float
    skipped: bool = False


def first_of(batch: Any) -> Any:
    """Return the model's inputs from a batch such as `(inputs, targets)`."""
    return batch[0] if isinstance(batch, tuple | list) else batch


def scalar_sum(result: tuple[Tensor, Tensor | float]) -> tuple[Tensor, Tensor | float]:
    """Return `result`, a pair (sum, count), with an fp16 or bf16 sum converted to fp32.

    Raises:
        ValueError: if the sum is not a scalar.
    """
    total, count = result
    if total.dim():
        raise ValueError(
            "expected loss(output, batch) to return a scalar sum and a count, got a sum of shape "
            f"{tuple(total.shape)}; sum the losses of the batch"
        )
    return total.float() if total.dtype in (torch.float16, torch.bfloat16) else total, count


def _computing_together(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the sets of ranks that communicate during forward passes."""
    axes = [axis for axis in ("pipeline", *MODEL_AXES) if mesh.width(axis) > 1]
    if not axes:
        return []
    return sorted({ranks_of(mesh.peers(cell, *axes)) for cell in mesh.cells})


class GlobalMean:
    """Runs micro-batches for `engine` and computes means over the ranks of `mesh`."""

    def __init__(self, engine: Engine, mesh: Mesh) -> None:
        self._engine, self._comm = engine, engine.comm
        self._replicas = mesh.replicas
        self.counts = mesh.has_own_loss(self._comm.rank)
        """Whether this rank's losses are counted; ranks with the same samples have the same losses."""
        self._together = _computing_together(mesh)
        self.expected: float | None = None
        """The total count of the last step; None before the first step."""

    def forward_backward(self, batches: Iterable[Any], loss: Loss, inputs: Callable[[Any], Any]) -> Step:
        """Run forward and backward passes over micro-batches; see `Engine.forward_backward`."""
        engine, own_batches = self._engine, list(batches)
        passes = self._most(len(own_batches))
        sums, counts = [], []
        for number in range(passes):
            last = number == passes - 1
            total, count = self._run(own_batches, number, loss, inputs)
            if self.expected is None:
                self.expected = self._estimate(count, passes)
            if total is None:
                engine.join_backward(last=last)
                continue
            sums.append(total.detach().double())
            counts.append(count)
            with nullcontext() if last else engine.accumulating():
                # gradients are averaged over the replicas
                engine.backward(total * (self._replicas / self.expected))
        mean, total_count = self._mean(sums, counts)
        if self.expected is not None and total_count != self.expected:
            engine.scale_all(self.expected / total_count)
        self.expected = total_count
        return Step(mean, total_count, skipped=engine.will_skip())

    def evaluate(self, batches: Iterable[Any], metric: Loss, inputs: Callable[[Any], Any]) -> float:
        """Return the mean of `metric` over the micro-batches of all ranks; see `Engine.evaluate`."""
        engine, own_batches = self._engine, list(batches)
        modes = [(module, module.training) for module in engine.model.modules()]
        engine.model.eval()
        try:
            with torch.no_grad():
                sums, counts = self._evaluate(own_batches, metric, inputs)
        finally:
            for module, mode in modes:
                module.training = mode
        return self._mean(sums, counts)[0]

    def _evaluate(
        self, batches: Sequence[Any], metric: Loss, inputs: Callable[[Any], Any]
    ) -> tuple[list[Tensor], list[Tensor | float]]:
        """Return the sums and the counts of `metric` for this rank's micro-batches."""
        sums: list[Tensor] = []
        counts: list[Tensor | float] = []
        for number in range(self._most(len(batches))):
            total, count = self._run(batches, number, metric, inputs)
            if total is not None:
                sums.append(total.double())
                counts.append(count)
        return sums, counts

    def _most(self, own: int) -> int:
        """Return the largest number of micro-batches on any rank; this rank has `own` micro-batches."""
        if self._comm.size == 1:
            return own
        numbers = torch.empty(self._comm.size, dtype=torch.int64)
        self._comm.all_gather(numbers, torch.tensor([own]))
        counts: list[int] = numbers.tolist()
        for ranks in self._together:
            if len({counts[rank] for rank in ranks}) > 1:
                found = ", ".join(f"{counts[rank]} on rank {rank}" for rank in ranks)
                raise ValueError(
                    "expected the same number of micro-batches on ranks that share layers, stages, sequences or experts, got "
                    f"{found}; pass the same number of batches on these ranks"
                )
        return max(counts)

    def _run(
        self, batches: Sequence[Any], number: int, loss: Loss, inputs: Callable[[Any], Any]
    ) -> tuple[Tensor | None, Tensor | float]:
        """Run micro-batch `number` and return (loss sum, count), or (None, 0) if this rank has no such micro-batch."""
        if number >= len(batches):
            self._engine.join_forward()
            return None, 0.0
        arguments = inputs(batches[number])
        if isinstance(arguments, Mapping):
            output = self._engine(**arguments)
        else:
            output = self._engine(*arguments) if isinstance(arguments, tuple) else self._engine(arguments)
        with self._engine.loss_parameters.hidden():
            return scalar_sum(loss(output, batches[number]))

    def _estimate(self, count: Tensor | float, passes: int) -> float:
        """Estimate the first step's total count, assuming that all micro-batches of a rank have the same count."""
        expected = torch.as_tensor(count).detach().double().cpu().reshape(1) * self.counts
        if self._comm.size > 1:
            self._comm.all_reduce(expected, "sum")
        return max(1.0, float(expected)) * passes

    def _mean(self, sums: Sequence[Tensor], counts: Sequence[Tensor | float]) -> tuple[float, float]:
        """Return the mean over all ranks, and the total count."""
        values = torch.zeros(2, dtype=torch.float64)
        if sums and self.counts:
            values[0] = torch.stack(list(sums)).sum().cpu()
            values[1] = sum(float(count) for count in counts)
        if self._comm.size > 1:
            self._comm.all_reduce(values, "sum")
        total, count = values.tolist()
        if not count > 0:
            raise ValueError(
                f"the counts that loss(output, batch) returned on all ranks sum to {count:g}: expected a positive sum; "
                "check the batches and the returned counts"
            )
        return total / count, count
