"""The base classes for compression settings, and for the state of a tensor that is reduced repeatedly."""

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
"""The tensors within a flat tensor, as pairs (first element, shape)."""


@dataclass(frozen=True, kw_only=True)
class Compression(ABC):
    """Compression settings, which must be equal on all ranks.

    If `error_feedback` is set, each message's compression error is added to the tensor's next message.
    """

    error_feedback: bool = True

    def for_tensor(self, count: int, parameters: Parameters = (), exact: int = 0) -> Compressor:
        """Return the compressor for one tensor.

        Args:
            count: The number of elements.
            parameters: The tensors within a flat tensor; only PowerSGD uses them.
            exact: The number of elements at the end that are not compressed.

        Raises:
            ValueError: if `exact` is out of range, or `parameters` overlap, are not in increasing order, or extend into
                the last `exact` elements.
        """
        if count < 0 or not 0 <= exact <= count:
            raise ValueError(f"expected 0 <= exact <= count, got exact={exact}, count={count}")
        ends = [first + torch.Size(shape).numel() for first, shape in parameters]
        starts = [first for first, _ in parameters]
        if any(a > b for a, b in zip([0, *ends], [*starts, count - exact], strict=True)):
            raise ValueError(
                f"expected parameters in increasing order, without overlaps, within the first {count - exact} "
                f"elements (the compressed elements), got {list(parameters)}"
            )
        return self._compressor(count, parameters, exact)

    @abstractmethod
    def _compressor(self, count: int, parameters: Parameters, exact: int) -> Compressor: ...


class Compressor(ABC):
    """The compression state for one tensor in one group; each leader stores the state for its shares.

    `state` maps names to tensors and belongs in this rank's checkpoint.  Tensors whose names start with "residual" have
    the same scale as the tensor's reduced values.
    """

    def __init__(self, compression: Compression, count: int, parameters: Parameters, exact: int) -> None:
        self.count, self.exact = count, exact
        self.state: dict[str, Tensor] = {}
        self._keeps_residuals = compression.error_feedback
        description = f"{compression} {count} {exact} {[(first, *shape) for first, shape in parameters]}"
        self.signature = [zlib.crc32(description.encode())]
        self._use: tuple[weakref.ref[object], str] | None = None

    def bind(self, group: object, op: str) -> None:
        """Record the group and the reduction; raise ValueError if they change, because residuals would be wrong."""
        if self._use is None:
            self._use = weakref.ref(group), op
        before, op_before = self._use
        if before() is not group:
            raise ValueError(
                "expected a compressor for this group, got one that belongs to another group; create a compressor "
                "for this group with `for_tensor`"
            )
        if op != op_before:
            raise ValueError(
                f"expected reduction {op_before!r} (as in earlier calls with this compressor), got {op!r}; create "
                "another compressor"
            )

    def windows(self, leaders: int, length: int) -> Iterator[list[int]]:
        """Split the tensor into windows of about `length` elements; yield the bounds of the leaders' shares."""
        end = self.count - self.exact
        for start in range(0, end, length):
            size = min(length, end - start)
            yield [start + size * leader // leaders for leader in range(leaders + 1)]

    @abstractmethod
    def reduce(
        self, share: Tensor, transport: Transport, start: int, factor: float, exactly: Reduce
    ) -> Steps:
        """Sum `share` times `factor` over the hosts in place; all hosts get bitwise equal results.

        The fp32 share starts at element `start` of the tensor.  `exactly` sums a tensor without compression.
        """

    def residual(self, start: int, share: Tensor) -> Tensor | None:
        """Return the accumulated compression error for a share, or None without error feedback."""
        if not self._keeps_residuals:
            return None
        name = f"residual.{start}"
        if name not in self.state:
            # the residual outlives the call and must not be an inference tensor
            with torch.inference_mode(False):
                self.state[name] = torch.zeros_like(share)
        return self.state[name]

    def scale_residuals(self, factor: float) -> None:
        """Multiply the residuals by `factor` when the loss scale changes."""
        for name, value in self.state.items():
            if name.startswith("residual"):
                value.mul_(factor)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved `state`."""
        self.state = {name: value.clone() for name, value in state.items()}


def compensated(share: Tensor, factor: float, residual: Tensor | None) -> Tensor:
    """Return share * factor + residual."""
    scaled = share * factor
    return scaled if residual is None else scaled.add_(residual)


def remember(residual: Tensor | None, missed: Tensor) -> None:
    """Store the compression error as the residual, except where the error is infinite or NaN."""
    if residual is not None:
        torch.where(missed.isfinite(), missed, residual, out=residual)
