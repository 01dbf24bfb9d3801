"""Collectives on tensors as calls of the C core: addresses, counts, and copies where a tensor is not dense.

Each function looks at its tensors at once and returns a call that the lane of the group runs in its turn.
A tensor that is not contiguous is copied to one that is, inside the call, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from farandole.comm.dense import as_real, copy_back, counts_of, pointers_to, readable, writable
from farandole.comm.dtypes import TYPES
from farandole.comm.host_group import HostGroup
from farandole.comm.work import Call


def of_type(tensor: Tensor, others: Sequence[Tensor]) -> int:
    """The core's number of the type that all tensors of a call have; ValueError if they differ."""
    for other in others:
        if other.dtype is not tensor.dtype:
            raise ValueError(
                f"tensors of one collective have one type, found {tensor.dtype} and {other.dtype}"
            )
    return TYPES[tensor.dtype]


class HostCollectives:
    """The collectives of a group whose ranks all share this host."""

    def __init__(self, host: HostGroup) -> None:
        self.host = host

    def barrier(self) -> Call:
        """Wait until every rank is here."""
        return lambda flags: self.host.check(self.host.core.frd_barrier(self.host.handle, flags))

    def all_reduce(self, tensors: Sequence[Tensor], reduction: int) -> Call:
        """Reduce each tensor over all ranks, in place."""

        def core_call(t: Tensor, flags: int) -> int:
            status: int = self.host.core.frd_all_reduce(
                self.host.handle, t.data_ptr(), t.numel(), TYPES[t.dtype], reduction, flags
            )
            return status

        return self._in_place(tensors, core_call)

    def reduce(self, tensor: Tensor, root: int, reduction: int) -> Call:
        """Reduce over all ranks into the tensor of rank `root`."""

        def core_call(t: Tensor, flags: int) -> int:
            status: int = self.host.core.frd_reduce(
                self.host.handle, t.data_ptr(), t.numel(), TYPES[t.dtype], reduction, root, flags
            )
            return status

        return self._in_place([tensor], core_call)

    def broadcast(self, tensor: Tensor, root: int) -> Call:
        """Copy the tensor of rank `root` to all ranks."""
        kind = TYPES[tensor.dtype]

        def call(flags: int) -> None:
            with torch.no_grad():
                buffer = readable(tensor) if self.host.rank == root else writable(tensor)
                count = buffer.numel()
                self.host.check(
                    self.host.core.frd_broadcast(
                        self.host.handle, buffer.data_ptr(), count, kind, root, flags
                    )
                )
                if self.host.rank != root:
                    copy_back([tensor], [buffer])

        return call

    def reduce_scatter_even(self, output: Tensor, tensor: Tensor, reduction: int) -> Call:
        """Reduce `tensor`, one equal part per rank, and keep this rank's part."""
        of_type(tensor, [output])

        def call(flags: int) -> None:
            with torch.no_grad():
                source, target = as_real(readable(tensor)), writable(output)
                real = as_real(target)
                self.host.check(
                    self.host.core.frd_reduce_scatter_even(
                        self.host.handle,
                        source.data_ptr(),
                        real.data_ptr(),
                        real.numel(),
                        TYPES[real.dtype],
                        reduction,
                        flags,
                    )
                )
                copy_back([output], [target])

        return call

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], reduction: int) -> Call:
        """Reduce a list of tensors, one per rank, and keep this rank's."""
        of_type(output, parts)
        if parts[self.host.rank].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter: the output has {output.numel()} elements, this rank's input {parts[self.host.rank].numel()}"
            )

        def call(flags: int) -> None:
            with torch.no_grad():
                sources, target = [as_real(readable(part)) for part in parts], writable(output)
                real = as_real(target)
                status = self.host.core.frd_reduce_scatter(
                    self.host.handle,
                    pointers_to(sources),
                    counts_of(sources),
                    real.data_ptr(),
                    TYPES[real.dtype],
                    reduction,
                    flags,
                )
                self.host.check(status)
                copy_back([output], [target])

        return call

    def all_gather_even(self, output: Tensor, tensor: Tensor) -> Call:
        """Concatenate every rank's tensor of the same length."""
        kind = of_type(tensor, [output])

        def call(flags: int) -> None:
            with torch.no_grad():
                source, target = readable(tensor), writable(output)
                status = self.host.core.frd_all_gather_even(
                    self.host.handle, source.data_ptr(), target.data_ptr(), source.numel(), kind, flags
                )
                self.host.check(status)
                copy_back([output], [target])

        return call

    def all_gather(self, parts: Sequence[Tensor], tensor: Tensor) -> Call:
        """Collect every rank's tensor, of any length, in `parts`."""
        kind = of_type(tensor, parts)

        def call(flags: int) -> None:
            with torch.no_grad():
                source, targets = readable(tensor), [writable(part) for part in parts]
                status = self.host.core.frd_all_gather(
                    self.host.handle, source.data_ptr(), pointers_to(targets), counts_of(targets), kind, flags
                )
                self.host.check(status)
                copy_back(parts, targets)

        return call

    def gather(self, parts: Sequence[Tensor], tensor: Tensor, root: int) -> Call:
        """Collect every rank's tensor of the same length in `parts` of rank `root`."""
        kind = of_type(tensor, parts)
        equal_lengths("gather", tensor, parts)

        def call(flags: int) -> None:
            with torch.no_grad():
                source, targets = readable(tensor), [writable(part) for part in parts]
                status = self.host.core.frd_gather(
                    self.host.handle,
                    source.data_ptr(),
                    pointers_to(targets),
                    source.numel(),
                    kind,
                    root,
                    flags,
                )
                self.host.check(status)
                copy_back(parts, targets)

        return call

    def scatter(self, output: Tensor, parts: Sequence[Tensor], root: int) -> Call:
        """Give every rank its tensor of `parts` of rank `root`."""
        kind = of_type(output, parts)
        equal_lengths("scatter", output, parts)

        def call(flags: int) -> None:
            with torch.no_grad():
                sources, target = [readable(part) for part in parts], writable(output)
                status = self.host.core.frd_scatter(
                    self.host.handle,
                    pointers_to(sources),
                    target.data_ptr(),
                    target.numel(),
                    kind,
                    root,
                    flags,
                )
                self.host.check(status)
                copy_back([output], [target])

        return call

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
        """Send input j to rank j, receive output i from rank i."""
        kind = of_type(inputs[0], [*inputs, *outputs])

        def call(flags: int) -> None:
            with torch.no_grad():
                sources, targets = [readable(part) for part in inputs], [writable(part) for part in outputs]
                status = self.host.core.frd_all_to_all(
                    self.host.handle,
                    pointers_to(sources),
                    counts_of(sources),
                    pointers_to(targets),
                    counts_of(targets),
                    kind,
                    flags,
                )
                self.host.check(status)
                copy_back(outputs, targets)

        return call

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Call:
        """`all_to_all` of the parts of two tensors, split along dimension 0."""
        outputs = split_rows(output, output_splits, self.host.size, "output")
        return self.all_to_all(outputs, split_rows(tensor, input_splits, self.host.size, "input"))

    def _in_place(self, tensors: Sequence[Tensor], core_call: Callable[[Tensor, int], int]) -> Call:
        def call(flags: int) -> None:
            with torch.no_grad():
                for tensor in tensors:
                    buffer = readable(tensor)
                    self.host.check(core_call(as_real(buffer), flags))
                    copy_back([tensor], [buffer])

        return call


def split_rows(tensor: Tensor, splits: list[int], ranks: int, what: str) -> list[Tensor]:
    """The parts of a tensor for each rank, along dimension 0; ValueError if the splits are not right."""
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    rows = tensor.shape[0]
    if not splits:
        if rows % ranks:
            raise ValueError(
                f"all_to_all: the {rows} rows of the {what} do not divide among {ranks} ranks; give splits"
            )
        splits = [rows // ranks] * ranks
    if len(splits) != ranks or sum(splits) != rows:
        raise ValueError(
            f"all_to_all: the {what} splits {splits} must be {ranks} numbers whose sum is its {rows} rows"
        )
    return list(tensor.split(splits))


def equal_lengths(call: str, tensor: Tensor, parts: Sequence[Tensor]) -> None:
    """ValueError unless all tensors of a call have one length."""
    for part in parts:
        if part.numel() != tensor.numel():
            raise ValueError(
                f"{call}: all tensors have one length, found {tensor.numel()} and {part.numel()} elements"
            )
