"""The collectives of a group on several hosts, as calls that its lane runs: what `HostCollectives` is for one host.

Tensors are made dense here, and the ranks agree on the call; `two_level.py` is how the values go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.comm.algorithms.choice import Choice
from farandole.comm.collectives import equal_lengths, of_type, split_rows
from farandole.comm.compression.base import Compressor
from farandole.comm.dense import as_real, copy_back, readable, writable
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.hosts import Hosts
from farandole.comm.two_level import TwoLevels, fingerprint
from farandole.comm.work import Call
from farandole.native import Call as CallRecord
from farandole.native import Operation


class SpanningCollectives:
    """The same calls as `HostCollectives`, for a group on several hosts."""

    def __init__(self, hosts: Hosts, choice: Choice) -> None:
        self.hosts = hosts
        self.host = hosts.host
        self._two = TwoLevels(hosts, choice)

    def barrier(self) -> Call:
        """Wait until every rank is here."""

        def call(flags: int) -> None:
            with self._two.declared(flags, Operation.BARRIER):
                token = torch.zeros(1, dtype=torch.uint8)
                self._two.all_reduce(token, REDUCTION_NAMES.index("max"), flags)

        return call

    def all_reduce(self, tensors: Sequence[Tensor], reduction: int) -> Call:
        """Reduce each tensor over all ranks, in place."""

        def call(flags: int) -> None:
            with torch.no_grad():
                for tensor in tensors:
                    buffer = readable(tensor)
                    flat = as_real(buffer).view(-1)
                    with self._two.declared(flags, Operation.ALL_REDUCE, flat, op=reduction):
                        self._two.all_reduce(flat, reduction, flags)
                    copy_back([tensor], [buffer])

        return call

    def all_reduce_compressed(self, tensor: Tensor, reduction: int, compressor: Compressor) -> Call:
        """Sum or average a tensor of floats, in place, compressed on the way between hosts."""
        compressor.bind(self.hosts, REDUCTION_NAMES[reduction])

        def call(flags: int) -> None:
            with torch.no_grad():
                buffer = readable(tensor)
                flat = buffer.view(-1)
                signature = compressor.signature
                with self._two.declared(flags, Operation.ALL_REDUCE, flat, op=reduction, split=signature):
                    wide = flat.float()  # itself, if it is
                    averages = REDUCTION_NAMES[reduction] == "avg"
                    self._two.all_reduce_compressed(wide, averages, compressor, flags)
                    copy_back([flat], [wide])
                copy_back([tensor], [buffer])

        return call

    def reduce(self, tensor: Tensor, root: int, reduction: int) -> Call:
        """Reduce over all ranks into the tensor of rank `root`."""

        def call(flags: int) -> None:
            with torch.no_grad():
                flat = as_real(readable(tensor)).reshape(-1).clone()
                with self._two.declared(flags, Operation.REDUCE, flat, op=reduction, root=root):
                    self._two.all_reduce(flat, reduction, flags)
                if self.host.group_rank == root:
                    real = as_real(tensor)
                    real.copy_(flat.view(real.shape))

        return call

    def broadcast(self, tensor: Tensor, root: int) -> Call:
        """Copy the tensor of rank `root` to all ranks."""

        def call(flags: int) -> None:
            with torch.no_grad():
                buffer = readable(tensor) if self.host.group_rank == root else writable(tensor)
                with self._two.declared(flags, Operation.BROADCAST, buffer, root=root):
                    self._two.broadcast(buffer.view(-1), root, flags)
                if self.host.group_rank != root:
                    copy_back([tensor], [buffer])

        return call

    def reduce_scatter_even(self, output: Tensor, tensor: Tensor, reduction: int) -> Call:
        """Reduce `tensor`, one equal part per rank, and keep this rank's part."""
        of_type(tensor, [output])

        def call(flags: int) -> None:
            with torch.no_grad():
                source, target = as_real(readable(tensor)).view(-1), writable(output)
                real = as_real(target).view(-1)
                counts = [real.numel()] * self.hosts.ranks
                with self._two.declared(flags, Operation.REDUCE_SCATTER, source, op=reduction):
                    self._two.reduce_scatter(source, counts, real, reduction, flags)
                copy_back([output], [target])

        return call

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], reduction: int) -> Call:
        """Reduce a list of tensors, one per rank, and keep this rank's."""
        of_type(output, parts)
        own = parts[self.host.group_rank].numel()
        if own != output.numel():
            raise ValueError(
                f"reduce_scatter: the output has {output.numel()} elements, this rank's input {own}"
            )

        def call(flags: int) -> None:
            with torch.no_grad():
                flats = [as_real(readable(part)).reshape(-1) for part in parts]
                counts, target = [flat.numel() for flat in flats], writable(output)
                source = torch.cat(flats)
                with self._two.declared(flags, Operation.REDUCE_SCATTER, source, op=reduction, split=counts):
                    self._two.reduce_scatter(source, counts, as_real(target).view(-1), reduction, flags)
                copy_back([output], [target])

        return call

    def all_gather_even(self, output: Tensor, tensor: Tensor) -> Call:
        """Concatenate every rank's tensor of the same length."""
        of_type(tensor, [output])

        def call(flags: int) -> None:
            with torch.no_grad():
                source, target = readable(tensor).view(-1), writable(output)
                counts = [source.numel()] * self.hosts.ranks
                with self._two.declared(flags, Operation.ALL_GATHER, source):
                    self._two.all_gather(source, counts, list(target.view(-1).split(counts)), flags)
                copy_back([output], [target])

        return call

    def all_gather(self, parts: Sequence[Tensor], tensor: Tensor) -> Call:
        """Collect every rank's tensor, of any length, in `parts`."""
        of_type(tensor, parts)

        def call(flags: int) -> None:
            with torch.no_grad():
                source, targets = readable(tensor), [writable(part) for part in parts]
                counts = [target.numel() for target in targets]
                whole = CallRecord(count=sum(counts), layout=fingerprint(counts))
                with self._two.declared(flags, Operation.ALL_GATHER, source, record=whole):
                    flats = [target.view(-1) for target in targets]
                    self._two.all_gather(source.view(-1), counts, flats, flags)
                copy_back(parts, targets)

        return call

    def gather(self, parts: Sequence[Tensor], tensor: Tensor, root: int) -> Call:
        """Collect every rank's tensor of the same length in `parts` of rank `root`."""
        of_type(tensor, parts)
        equal_lengths("gather", tensor, parts)

        def call(flags: int) -> None:
            with torch.no_grad():
                source, targets = readable(tensor), [writable(part) for part in parts]
                with self._two.declared(flags, Operation.GATHER, source, root=root):
                    self._two.run(self._two.gather(source, targets, root))
                copy_back(parts, targets)

        return call

    def scatter(self, output: Tensor, parts: Sequence[Tensor], root: int) -> Call:
        """Give every rank its tensor of `parts` of rank `root`."""
        of_type(output, parts)
        equal_lengths("scatter", output, parts)

        def call(flags: int) -> None:
            with torch.no_grad():
                sources, target = [readable(part) for part in parts], writable(output)
                with self._two.declared(flags, Operation.SCATTER, target, root=root):
                    self._two.run(self._two.scatter(target, sources, root))
                copy_back([output], [target])

        return call

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
        """Send input j to rank j, receive output i from rank i."""
        of_type(inputs[0], [*inputs, *outputs])
        own = self.host.group_rank
        if inputs[own].numel() != outputs[own].numel():
            raise ValueError(
                f"all_to_all: this rank's part for itself has {inputs[own].numel()} elements where it is sent "
                f"and {outputs[own].numel()} where it is received"
            )

        def call(flags: int) -> None:
            with torch.no_grad():
                sources, targets = [readable(part) for part in inputs], [writable(part) for part in outputs]
                record = CallRecord(type=TYPES[sources[0].dtype])
                with self._two.declared(flags, Operation.ALL_TO_ALL, record=record):
                    self._two.run(self._two.all_to_all(targets, sources))
                copy_back(outputs, targets)

        return call

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Call:
        """`all_to_all` of the parts of two tensors, split along dimension 0."""
        outputs = split_rows(output, output_splits, self.hosts.ranks, "output")
        return self.all_to_all(outputs, split_rows(tensor, input_splits, self.hosts.ranks, "input"))
