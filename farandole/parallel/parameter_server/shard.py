"""The state of a server: parameters, and the optimizer that updates them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from farandole.parallel.optimizers.probe import why_not_by_parameter, why_not_elementwise
from farandole.parallel.parameter_server.layout import Buffers, Packing
from farandole.parallel.parameter_server.schedule import Contribution

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Shard:
    """A server's pieces of the model's parameters, and the optimizer that updates them.

    `version` is the number of optimizer steps so far.

    Raises:
        TypeError: if `make_optimizer` does not return an optimizer.
        ValueError: if the optimizer cannot run on a server.
    """

    def __init__(self, packing: Packing, make_optimizer: MakeOptimizer) -> None:
        self.packing = packing
        self.values: Buffers = packing.buffers()
        self.version = 0
        self._parameters = [nn.Parameter(view) for view in packing.views(self.values)]
        self._gradients = packing.buffers()
        self._views = packing.views(self._gradients)
        # a server has no pieces if there are fewer tensors than servers
        self._optimizer = _checked(make_optimizer(self._parameters), packing) if self._parameters else None

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Run one optimizer step with the weighted mean gradient sum(w g) / sum(w).

        Pieces for which no worker has a gradient are not updated.
        """
        total = sum(contribution.weight for contribution in contributions)
        for dtype, gradient in self._gradients.items():
            gradient.zero_()
            for contribution in contributions:
                gradient.add_(contribution.gradients[dtype], alpha=contribution.weight / total)
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            used = any(contribution.has[index] for contribution in contributions)
            parameter.grad = view if used else None
        if self._optimizer is not None:
            self._optimizer.step()
        self.version += 1

    def snapshot(self, into: Buffers) -> list[Tensor]:
        """Copy the current parameters into the buffers `into`, and return the buffers."""
        for dtype, values in self.values.items():
            into[dtype].copy_(values)
        return list(into.values())


def _checked(optimizer: object, packing: Packing) -> torch.optim.Optimizer:
    """Return `optimizer`, or raise an error if it cannot run on a server."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"expected a function that returns an optimizer, got a function that returns {type(optimizer).__name__}; "
            "try `return torch.optim.SGD(parameters, lr=0.1)`"
        )
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{kind.__name__} evaluates the model in its step, which a server cannot do; use SGD, Adam or AdamW"
        )
    split = not all(piece.whole for piece in packing.pieces)
    if split and (reason := why_not_elementwise(optimizer)):
        nearest = "one server" if why_not_by_parameter(optimizer) else "session(..., split=False)"
        raise ValueError(
            f"{kind.__name__} cannot be used with large tensors, which are split among the servers: {reason}; "
            f"use {nearest}, or an elementwise optimizer such as AdamW"
        )
    return optimizer
