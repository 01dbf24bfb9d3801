"""Base classes for compression settings, and for the compression state of a tensor."""

from __future__ import annotations

import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.comm.algorithms.steps import Reduce, Steps
from farandole.comm.notices import warn_once
from farandole.comm.transport import Transport

Parameters = Sequence[tuple[int, Sequence[int]]]
"""Describes the parameters whose gradients a flat tensor contains: (index of the first element, shape) for each."""


@dataclass(frozen=True, kw_only=True)
class Compression(ABC):
    """Compression settings, which must be equal on all ranks.

    If `error_feedback` is True, the compression error of each message is added to the next message for the same tensor.
    """

    error_feedback: bool = True

    def for_tensor(self, count: int, parameters: Parameters = (), exact: int = 0) -> Compressor:
        """Return a compressor with these settings for one tensor.

        Args:
            count: The number of elements of the tensor.
            parameters: The parameters whose gradients the tensor contains; only PowerSGD uses them.
            exact: The number of elements at the end of the tensor that are not compressed.

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
    """The compression state of one tensor that is reduced in one group.

    `state` is a dict that maps names to tensors.  On each leader, `state` contains the state of the shares that this
    leader reduces.  Save `state` in this rank's checkpoint.  Tensors whose names start with "residual" contain
    compression errors, on the same scale as the reduced values.
    """

    def __init__(self, compression: Compression, count: int, parameters: Parameters, exact: int) -> None:
        self.count, self.exact = count, exact
        self.state: dict[str, Tensor] = {}
        self._keeps_residuals = compression.error_feedback
        description = f"{compression} {count} {exact} {[(first, *shape) for first, shape in parameters]}"
        self.signature = [zlib.crc32(description.encode())]
        self._use: tuple[weakref.ref[object], str] | None = None

    def bind(self, group: object, op: str) -> None:
        """Record the group and the reduction on the first call, and check on later calls that both are unchanged.

        Raises:
            ValueError: if the group or the reduction has changed.
        """
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
        """Split the compressed elements of the tensor into windows of about `length` elements.

        For each window, yield a list `bounds`.  The share of leader i consists of the elements from `bounds[i]` up to,
        but not including, `bounds[i + 1]`.
        """
        end = self.count - self.exact
        for start in range(0, end, length):
            size = min(length, end - start)
            yield [start + size * leader // leaders for leader in range(leaders + 1)]

    @abstractmethod
    def reduce(
        self, share: Tensor, transport: Transport, start: int, factor: float, exactly: Reduce
    ) -> Steps:
        """Replace `share` with the approximate sum of `factor * share` over all hosts.

        All hosts get bitwise equal results.

        Args:
            share: The values to sum, in fp32.
            transport: The transport to the leaders that reduce the same share on the other hosts.
            start: The index of the first element of `share` in the tensor.
            factor: The factor by which the values are multiplied before they are summed.
            exactly: An algorithm that sums a tensor without compression.
        """

    def sent_fraction(self, hosts: int) -> float:
        """Return the ratio of the bytes sent between hosts to the bytes of an uncompressed fp32 all-reduce.

        This base class returns 1.
        """
        return 1.0

    def state_bytes(self, leaders: int, leader: int, length: int) -> int:
        """Return the size in bytes of the state on leader `leader`; see `windows` for the other arguments."""
        return sum(
            self._share_bytes(bounds[leader], bounds[leader + 1]) for bounds in self.windows(leaders, length)
        )

    def _share_bytes(self, start: int, end: int) -> int:
        """Return the size in bytes of the state for the share from element `start` to `end`."""
        return (end - start) * torch.float32.itemsize if self._keeps_residuals else 0

    def residual(self, start: int, share: Tensor) -> Tensor | None:
        """Return the accumulated compression error of the share that begins at element `start`.

        Without error feedback, return None.
        """
        if not self._keeps_residuals:
            return None
        name = f"residual.{start}"
        if self._stored(name, share.shape) is None:
            # the residual outlives the call and must not be an inference tensor
            with torch.inference_mode(False):
                self.state[name] = torch.zeros_like(share)
        return self.state[name]

    def _stored(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """Return tensor `name` from the state; if its shape, dtype or device is wrong, discard it and return None."""
        tensor = self.state.get(name)
        if tensor is None:
            return None
        if (
            tensor.shape == torch.Size(shape)
            and tensor.dtype is torch.float32
            and tensor.device.type == "cpu"
        ):
            return tensor
        warn_once(
            "the loaded compression state was saved with a different number of hosts or ranks, or with different "
            "settings; parts that do not fit are discarded"
        )
        del self.state[name]
        return None

    def scale_residuals(self, factor: float) -> None:
        """Multiply the residuals by `factor`; call this method when the loss scale is multiplied by `factor`."""
        for name, value in self.state.items():
            if name.startswith("residual"):
                value.mul_(factor)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace `self.state` with a copy of `state`, which was saved in a checkpoint."""
        self.state = {
            name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()
        }


def compensated(share: Tensor, factor: float, residual: Tensor | None) -> Tensor:
    """Return `share * factor + residual`, or `share * factor` if `residual` is None."""
    scaled = share * factor
    return scaled if residual is None else scaled.add_(residual)


def remember(residual: Tensor | None, missed: Tensor) -> None:
    """Store the compression error `missed` in `residual`, unless `residual` is None.

    Elements of `residual` for which the error is infinite or NaN keep their values.
    """
    if residual is not None:
        torch.where(missed.isfinite(), missed, residual, out=residual)
