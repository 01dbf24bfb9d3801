"""What every compression has in common: its settings, and the state of one tensor that is reduced repeatedly."""

from __future__ import annotations

import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Reduce, Steps
from farandole.comm.transport import Transport

Parameters = Sequence[tuple[int, Sequence[int]]]
"""Where in a flat tensor the tensors lie that it consists of: (first element, shape) of each."""


@dataclass(frozen=True, kw_only=True)
class Compression(ABC):
    """How to compress; the same on all ranks.

    With `error_feedback` what a message misses is remembered and added to the next one of the same tensor.
    """

    error_feedback: bool = True

    def for_tensor(self, count: int, parameters: Parameters = (), exact: int = 0) -> Compressor:
        """The state for one tensor of `count` elements, the last `exact` of which are not compressed.

        `parameters` says of what a flat tensor consists; only PowerSGD makes use of it.
        """
        if count < 0 or not 0 <= exact <= count:
            raise ValueError(f"expected exact between 0 and {count} elements, got {exact}")
        ends = [first + torch.Size(shape).numel() for first, shape in parameters]
        starts = [first for first, _ in parameters]
        if any(a > b for a, b in zip([0, *ends], [*starts, count - exact], strict=True)):
            raise ValueError(
                f"the parameters {list(parameters)} are not in order, or not within the {count - exact} "
                f"elements that are compressed"
            )
        return self._compressor(count, parameters, exact)

    @abstractmethod
    def _compressor(self, count: int, parameters: Parameters, exact: int) -> Compressor: ...


class Compressor(ABC):
    """What is remembered of one tensor of one group: on a leader, for its shares.

    `state` has tensors by name, for a checkpoint of this rank; those whose name begins with "residual" are in the
    unit of the tensor's reduced values.
    """

    def __init__(self, compression: Compression, count: int, parameters: Parameters, exact: int) -> None:
        self.count, self.exact = count, exact
        self.state: dict[str, Tensor] = {}
        self._keeps_residuals = compression.error_feedback
        description = f"{compression} {count} {exact} {[(first, *shape) for first, shape in parameters]}"
        self.signature = [zlib.crc32(description.encode())]
        self._use: tuple[weakref.ref[object], str] | None = None

    def bind(self, group: object, op: str) -> None:
        """Note for what it is used; ValueError where that changes, as residuals would be added to other values."""
        if self._use is None:
            self._use = weakref.ref(group), op
        before, op_before = self._use
        if before() is not group:
            raise ValueError(
                "this compressor belongs to another group; create one for this group with `for_tensor`"
            )
        if op != op_before:
            raise ValueError(
                f"expected reduction {op_before!r} as in earlier calls of this compressor, got {op!r}; create another compressor"
            )

    def windows(self, leaders: int, length: int) -> Iterator[list[int]]:
        """Pieces of about `length` elements: the bounds of the leaders' shares of each."""
        end = self.count - self.exact
        for start in range(0, end, length):
            size = min(length, end - start)
            yield [start + size * leader // leaders for leader in range(leaders + 1)]

    @abstractmethod
    def reduce(
        self, share: Tensor, transport: Transport, start: int, factor: float, exactly: Reduce
    ) -> Steps:
        """Sum `share` times `factor` over the hosts, in place; all hosts get the same bits.

        The share is fp32 and begins at element `start` of the tensor; `exactly` sums a tensor without compression.
        """

    def residual(self, start: int, share: Tensor) -> Tensor | None:
        """What messages have missed so far of a share; None without error feedback."""
        if not self._keeps_residuals:
            return None
        name = f"residual.{start}"
        if name not in self.state:
            with torch.inference_mode(False):  # it outlives the call, and is written in any mode
                self.state[name] = torch.zeros_like(share)
        return self.state[name]

    def scale_residuals(self, factor: float) -> None:
        """Change their unit, where that of the tensor's values changes (the scale of a loss)."""
        for name, value in self.state.items():
            if name.startswith("residual"):
                value.mul_(factor)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from an earlier `state`."""
        self.state = {name: value.clone() for name, value in state.items()}


def compensated(share: Tensor, factor: float, residual: Tensor | None) -> Tensor:
    """share * factor + residual."""
    scaled = share * factor
    return scaled if residual is None else scaled.add_(residual)


def remember(residual: Tensor | None, missed: Tensor) -> None:
    """Keep what was missed, but no infinity or NaN: where it is one, the residual stays as it was."""
    if residual is not None:
        torch.where(missed.isfinite(), missed, residual, out=residual)
