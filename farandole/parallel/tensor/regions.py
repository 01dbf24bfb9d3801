"""Wrappers for modules that the ranks of the tensor axis compute together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from farandole.models.layers import SelfAttention
from farandole.parallel.axes import AxisCommunicator, Position
from farandole.parallel.collectives import (
    copy_to_all,
    gather_and_reduce,
    linear_of_copies,
    sum_of_all,
)

AXIS = "tensor"


class ColumnLinear(nn.Linear):
    """A column-parallel layer that is the only user of its region's input.

    The input enters the region in this layer, so that the all-reduce of the backward pass overlaps with the computation
    of the weight gradient (`linear_of_copies`).
    """

    comm: AxisCommunicator

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's outputs (..., out) for `input` (..., in)."""
        return linear_of_copies(input, self.weight, self.bias, self.comm)


def enter_at(linear: nn.Module, comm: AxisCommunicator | None) -> bool:
    """Convert the column-parallel layer `linear` to a `ColumnLinear` in place, if possible.

    Returns:
        Whether `linear` was converted: False for a subclass of `nn.Linear`, or if `comm` does not overlap
            communication with computation.
    """
    if comm is None or not comm.overlaps or type(linear) is not nn.Linear:
        return False
    linear.__class__ = ColumnLinear
    linear.comm = comm  # type: ignore[assignment]
    return True


class Region:
    """Wraps a region: the first `inputs` arguments enter the region, and the output is summed over ranks."""

    def __init__(self, comm: AxisCommunicator | None, inputs: int) -> None:
        self._comm, self._inputs = comm, inputs

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the region."""
        inputs, rest, kwargs = leading(module, self._inputs, args, kwargs)
        entering = [copy_to_all(each, self._comm) for each in inputs]
        return sum_of_all(call(*entering, *rest, **kwargs), self._comm)


def leading(
    module: nn.Module, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """Return the first `count` arguments of a call, the other positional arguments, and the other keyword arguments.

    The first `count` arguments may also be passed by keyword.
    """
    if len(args) < count and kwargs:
        names = list(inspect.signature(module.forward).parameters)
        kwargs = dict(kwargs)
        while len(args) < count and names[len(args)] in kwargs:
            args = (*args, kwargs.pop(names[len(args)]))
    if len(args) < count:
        raise TypeError(
            f"{type(module).__name__}: expected {count} inputs of a tensor-parallel region, got {len(args)}; pass them "
            "as the first positional arguments, or by keyword"
        )
    return args[:count], args[count:], kwargs


class SharedBias:
    """Wraps a linear layer that is split by rows: each rank adds the bias divided by the number of ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the linear layer."""
        bias = module._parameters["bias"]
        assert bias is not None
        module._parameters["bias"] = bias / self._ranks  # type: ignore[assignment]
        try:
            return call(*args, **kwargs)
        finally:
            module._parameters["bias"] = bias


class GatherHead:
    """Wraps a projection to queries, keys and values in which several ranks share a key-value head.

    Each of these ranks computes a slice of the head's keys and values, and gathers the other slices.
    """

    def __init__(self, attention: SelfAttention, position: Position, ranks: int) -> None:
        self._width, self._ranks = attention.head_width, ranks
        first = position.coordinate(AXIS) // ranks * ranks
        self._comm = position.part_of(AXIS, range(first, first + ranks))

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return this rank's queries, and the complete keys and values of the shared head."""
        projected: Tensor = call(*args, **kwargs)
        part = self._width // self._ranks
        query, own = projected.split((projected.shape[-1] - 2 * part, 2 * part), -1)
        every = gather_and_reduce(own[None], self._ranks, self._comm)  # (ranks, ..., keys and values)
        both = every.unflatten(-1, (2, part)).movedim(0, -2)  # (..., 2, ranks, part)
        return torch.cat((query, both.flatten(-3)), -1)
