"""The base classes of compressions: the settings, and the state of one tensor that is reduced repeatedly."""

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
"""The tensors inside a flat tensor: (first element, shape) of each."""


@dataclass(frozen=True, kw_only=True)
class Compression(ABC):
    """The settings of a compression, equal on all ranks.

    With `error_feedback` the compression error of a message is added to the next message of the same tensor.
    """

    error_feedback: bool = True

    def for_tensor(self, count: int, parameters: Parameters = (), exact: int = 0) -> Compressor:
        """Return the compressor of one tensor.

        Args:
            count: The number of elements.
            exact: How many elements at the end are not compressed.
            parameters: The tensors inside a flat tensor; only PowerSGD uses them.
        """
        if count < 0 or not 0 <= exact <= count:
            raise ValueError(f"expected exact between 0 and {count} elements, got {exact}")
        ends = [first + torch.Size(shape).numel() for first, shape in parameters]
        starts = [first for first, _ in parameters]
        if any(a > b for a, b in zip([0, *ends], [*starts, count - exact], strict=True)):
            raise ValueError(
                f"expected parameters in order and within the {count - exact} elements that are compressed"
            )
        return self._compressor(count, parameters, exact)

    @abstractmethod
    def _compressor(self, count: int, parameters: Parameters, exact: int) -> Compressor: ...


class Compressor(ABC):
    """The state of one tensor of one group; on a leader, of its shares of the tensor.

    `state` maps names to tensors, for a checkpoint of this rank.  Tensors whose name starts with "residual" have the
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
        """Record the group and the reduction; raise ValueError if they change, as residuals would be wrong."""
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
        """Divide the tensor into windows of about `length` elements; return the bounds of each leader's share."""
        end = self.count - self.exact
        for start in range(0, end, length):
            size = min(length, end - start)
            yield [start + size * leader // leaders for leader in range(leaders + 1)]

    @abstractmethod
    def reduce(
        self, share: Tensor, transport: Transport, start: int, factor: float, exactly: Reduce
    ) -> Steps:
        """Sum `share` times `factor` over the hosts, in place; all hosts get bitwise equal results.

        The share is fp32 and starts at element `start` of the tensor.  `exactly` sums a tensor without compression.
        """

    def residual(self, start: int, share: Tensor) -> Tensor | None:
        """Return the accumulated compression error of a share; None without error feedback."""
        if not self._keeps_residuals:
            return None
        name = f"residual.{start}"
        if name not in self.state:
            # the residual outlives the call and must not be an inference tensor
            with torch.inference_mode(False):
                self.state[name] = torch.zeros_like(share)
        return self.state[name]

    def scale_residuals(self, factor: float) -> None:
        """Scale the residuals when the unit of the tensor's values changes (a new loss scale)."""
        for name, value in self.state.items():
            if name.startswith("residual"):
                value.mul_(factor)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore an earlier `state`."""
        self.state = {name: value.clone() for name, value in state.items()}


def compensated(share: Tensor, factor: float, residual: Tensor | None) -> Tensor:
    """Return share * factor + residual."""
    scaled = share * factor
    return scaled if residual is None else scaled.add_(residual)


def remember(residual: Tensor | None, missed: Tensor) -> None:
    """Store the compression error; where the error is infinite or NaN, keep the previous residual."""
    if residual is not None:
        torch.where(missed.isfinite(), missed, residual, out=residual)
