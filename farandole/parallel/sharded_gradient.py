"""The `.grad` of a parameter that the optimizer updates elsewhere: in shards, or in another type.

    parameter.grad                                   # ShardedGradient, without memory
    nn.utils.clip_grad_norm_(model.parameters(), 1)  # the global norm, and the same factor on every rank's shards
    parameter.grad.abs()                             # RuntimeError: names the calls of the engine

Without it such a parameter had no gradient for the functions of PyTorch, which then computed with nothing.  What one process
can do element by element, and norms, are supported; anything else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.comm.communicator import Communicator

_ATEN = torch.ops.aten
_ELEMENTWISE = {
    _ATEN.mul_.Tensor,
    _ATEN.mul_.Scalar,
    _ATEN.div_.Tensor,
    _ATEN.div_.Scalar,
    _ATEN.clamp_.default,
    _ATEN.clamp_min_.default,
    _ATEN.clamp_max_.default,
    _ATEN.zero_.default,
    _ATEN.nan_to_num_.default,
}
"""What changes each element by itself, by one number."""


class GradientNorms:
    """The norm of every parameter's averaged gradient; one collective computes all.

    Args:
        names: of all parameters of the model, in an order that is the same on all ranks.
        parts: yields (name of a parameter, part of its gradient on this rank, number of ranks that have the same part).
        comm: the ranks whose parts are added up; None if this rank has whole gradients.
    """

    def __init__(
        self,
        names: Iterable[str],
        parts: Callable[[], Iterator[tuple[str, Tensor, int]]],
        device: torch.device,
        comm: Communicator | None,
    ) -> None:
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._device, self._comm = device, comm
        self._parts = parts
        self._norms: dict[float, list[Tensor]] = {}

    def number(self, name: str) -> int:
        """The place of a parameter among `names`."""
        return self._numbers[name]

    def clear(self) -> None:
        """Forget the norms: the gradients have changed."""
        self._norms.clear()

    def of(self, name: str, order: float) -> Tensor:
        """The norm of a parameter's gradient.  The first call after a change is collective."""
        if order not in self._norms:
            self._norms[order] = self._compute(order)
        return self._norms[order][self._numbers[name]]

    def total(self) -> float:
        """The Euclidean norm of all gradients; infinite or NaN if any element is.  A collective call."""
        squares: dict[int, list[Tensor]] = {}
        for _, part, holders in self._parts():
            kind = torch.promote_types(part.dtype, torch.float32)
            squares.setdefault(holders, []).append(
                torch.linalg.vector_norm(part, dtype=kind).to(self._device, torch.float64)
            )
        if self._comm is None:
            norms = [norm for each in squares.values() for norm in each]
            return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        square = torch.zeros((), dtype=torch.float64)
        for holders, each in squares.items():
            square += (torch.linalg.vector_norm(torch.stack(each)) ** 2 / holders).cpu()
        self._comm.all_reduce(square)
        return float(square.sqrt())

    def _compute(self, order: float) -> list[Tensor]:
        powers = torch.zeros(len(self.names), dtype=torch.float64, device=self._device)
        largest = math.isinf(order)
        for name, part, holders in self._parts():
            kind = torch.promote_types(part.dtype, torch.float32)
            norm = torch.linalg.vector_norm(part, order, dtype=kind).double()
            powers[self._numbers[name]] = (
                norm if largest else norm**order / (1 if self._comm is None else holders)
            )
        if self._comm is not None:
            self._comm.all_reduce(powers, "max" if largest else "sum")
        return list((powers if largest else powers ** (1 / order)).float())


class ShardedGradient(Tensor):
    """Stands for the averaged gradient of `parameter`, of which this rank has the part `share`, if any."""

    _share: Tensor | None
    _norms: GradientNorms
    _name: str
    received: Tensor | None
    """What autograd has added in a further backward pass."""

    @staticmethod
    def __new__(
        cls, parameter: Tensor, share: Tensor | None, norms: GradientNorms, name: str
    ) -> ShardedGradient:
        """Make one, of the parameter's shape, type and device."""
        made: ShardedGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made._share, made._norms, made._name = share, norms, name
        made.received = None
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is."""
        return f"ShardedGradient({self._name}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute what is supported."""
        gradient, *rest = args
        if isinstance(gradient, cls) and not any(isinstance(each, cls) for each in rest):
            if function in _ELEMENTWISE:
                return gradient._change(function, rest, kwargs or {})
            if function is _ATEN.linalg_vector_norm.default and len(rest) < 2:
                return gradient._norm(*rest)
            if function is _ATEN.detach.default:
                return gradient
            if function is _ATEN.add_.Tensor and torch._C._current_graph_task_id() != -1:
                gradient.received = rest[
                    0
                ]  # autograd accumulates in a further pass; the hook of the parameter takes it
                return gradient
        found = next(each for each in _flat(args) if isinstance(each, cls))
        raise RuntimeError(
            f"{function.__name__.split('.')[0]} of the gradient of {found._name}: this rank does not have the whole gradient in "
            f"the type of the parameter. engine.gradients() returns what it has; engine.clip(max_norm), engine.gradient_norm() and "
            f"engine.scale_gradients(factor) work on all of it, and so do torch.nn.utils.clip_grad_norm_ and clip_grad_value_"
        )

    def _change(self, function: Any, rest: Sequence[Any], kwargs: dict[str, Any]) -> ShardedGradient:
        if any(isinstance(each, Tensor) and each.numel() != 1 for each in rest):
            raise RuntimeError(
                f"the gradient of {self._name} is changed by a tensor of many elements, and this rank does not have the whole "
                f"gradient; engine.gradients() returns what it has"
            )
        self._norms.clear()
        if self._share is not None:
            function(self._share, *rest, **kwargs)
        return self

    def _norm(self, order: float = 2.0) -> Tensor:
        if not order > 0:
            raise RuntimeError(
                f"norm of order {order} of the gradient of {self._name}: orders above 0 and infinity are supported; "
                f"engine.gradients() returns what this rank has of all gradients"
            )
        return self._norms.of(self._name, float(order))


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)
    else:
        yield values
