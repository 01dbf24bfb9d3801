"""Collectives of a group on several hosts, in two levels: shared memory inside a host, messages between hosts.

Of every host the first `leaders` ranks lead, each its own share of a tensor: shared memory brings the share
of leader l together on the host, the l-th leaders of all hosts reduce it among themselves, all leaders at once,
and shared memory spreads the results.  So a link carries each byte once, whatever the number of ranks behind
it, and all ranks of a host keep it busy.  A large tensor goes in windows, so that the link works on some
windows while shared memory works on others.

M. Bayatpour et al.: Scalable reduction collectives with data partitioning-based multi-leader design (SC 2017).
"""

from __future__ import annotations

import ctypes
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from farandole.comm.algorithms import tree
from farandole.comm.algorithms.choice import Choice
from farandole.comm.algorithms.ring import all_gather as ring_all_gather
from farandole.comm.algorithms.ring import reduce_scatter as ring_reduce_scatter
from farandole.comm.algorithms.steps import Combine, Running, Steps, split
from farandole.comm.collectives import equal_lengths, of_type, split_rows
from farandole.comm.dense import as_real, copy_back, counts_of, pointers_to, readable, writable
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.hosts import Hosts
from farandole.comm.work import Call
from farandole.native import Call as CallRecord
from farandole.native import Operation

WINDOW_BYTES = 4 << 20
"""How much of a tensor, over all ranks of a host, is under way in one piece."""
WINDOWS_AHEAD = 2
"""How many windows may wait for the link while shared memory goes on with the next."""

_SUM, _AVG = REDUCTION_NAMES.index("sum"), REDUCTION_NAMES.index("avg")


class SpanningCollectives:
    """The same calls as `HostCollectives`, for a group on several hosts."""

    def __init__(self, hosts: Hosts, choice: Choice) -> None:
        self.hosts = hosts
        self.host = hosts.host
        self._choice = choice
        self._deadline = 0.0  # of the call under way
        self._agreement = Running(iter(()))

    # ---- calls ----

    def barrier(self) -> Call:
        """Wait until every rank is here."""

        def call(flags: int) -> None:
            with self._declared(flags, Operation.BARRIER):
                token = torch.zeros(1, dtype=torch.uint8)
                self._all_reduce(token, REDUCTION_NAMES.index("max"), flags)

        return call

    def all_reduce(self, tensors: Sequence[Tensor], reduction: int) -> Call:
        """Reduce each tensor over all ranks, in place."""

        def call(flags: int) -> None:
            with torch.no_grad():
                for tensor in tensors:
                    buffer = readable(tensor)
                    flat = as_real(buffer).view(-1)
                    with self._declared(flags, Operation.ALL_REDUCE, flat, op=reduction):
                        self._all_reduce(flat, reduction, flags)
                    copy_back([tensor], [buffer])

        return call

    def reduce(self, tensor: Tensor, root: int, reduction: int) -> Call:
        """Reduce over all ranks into the tensor of rank `root`."""

        def call(flags: int) -> None:
            with torch.no_grad():
                flat = as_real(readable(tensor)).reshape(-1).clone()
                with self._declared(flags, Operation.REDUCE, flat, op=reduction, root=root):
                    self._all_reduce(flat, reduction, flags)
                if self.host.group_rank == root:
                    real = as_real(tensor)
                    real.copy_(flat.view(real.shape))

        return call

    def broadcast(self, tensor: Tensor, root: int) -> Call:
        """Copy the tensor of rank `root` to all ranks."""

        def call(flags: int) -> None:
            with torch.no_grad():
                buffer = readable(tensor) if self.host.group_rank == root else writable(tensor)
                with self._declared(flags, Operation.BROADCAST, buffer, root=root):
                    self._broadcast(buffer.view(-1), root, flags)
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
                with self._declared(flags, Operation.REDUCE_SCATTER, source, op=reduction):
                    self._reduce_scatter(source, counts, real, reduction, flags)
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
                with self._declared(flags, Operation.REDUCE_SCATTER, source, op=reduction, split=counts):
                    self._reduce_scatter(source, counts, as_real(target).view(-1), reduction, flags)
                copy_back([output], [target])

        return call

    def all_gather_even(self, output: Tensor, tensor: Tensor) -> Call:
        """Concatenate every rank's tensor of the same length."""
        of_type(tensor, [output])

        def call(flags: int) -> None:
            with torch.no_grad():
                source, target = readable(tensor).view(-1), writable(output)
                counts = [source.numel()] * self.hosts.ranks
                with self._declared(flags, Operation.ALL_GATHER, source):
                    self._all_gather(source, counts, list(target.view(-1).split(counts)), flags)
                copy_back([output], [target])

        return call

    def all_gather(self, parts: Sequence[Tensor], tensor: Tensor) -> Call:
        """Collect every rank's tensor, of any length, in `parts`."""
        of_type(tensor, parts)

        def call(flags: int) -> None:
            with torch.no_grad():
                source, targets = readable(tensor), [writable(part) for part in parts]
                counts = [target.numel() for target in targets]
                whole = CallRecord(count=sum(counts), layout=_fingerprint(counts))
                with self._declared(flags, Operation.ALL_GATHER, source, record=whole):
                    flats = [target.view(-1) for target in targets]
                    self._all_gather(source.view(-1), counts, flats, flags)
                copy_back(parts, targets)

        return call

    def gather(self, parts: Sequence[Tensor], tensor: Tensor, root: int) -> Call:
        """Collect every rank's tensor of the same length in `parts` of rank `root`."""
        of_type(tensor, parts)
        equal_lengths("gather", tensor, parts)

        def call(flags: int) -> None:
            with torch.no_grad():
                source, targets = readable(tensor), [writable(part) for part in parts]
                with self._declared(flags, Operation.GATHER, source, root=root):
                    self._run(self._gather(source, targets, root))
                copy_back(parts, targets)

        return call

    def scatter(self, output: Tensor, parts: Sequence[Tensor], root: int) -> Call:
        """Give every rank its tensor of `parts` of rank `root`."""
        of_type(output, parts)
        equal_lengths("scatter", output, parts)

        def call(flags: int) -> None:
            with torch.no_grad():
                sources, target = [readable(part) for part in parts], writable(output)
                with self._declared(flags, Operation.SCATTER, target, root=root):
                    self._run(self._scatter(target, sources, root))
                copy_back([output], [target])

        return call

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
        """Send input j to rank j, receive output i from rank i."""
        of_type(inputs[0], [*inputs, *outputs])

        def call(flags: int) -> None:
            with torch.no_grad():
                sources, targets = [readable(part) for part in inputs], [writable(part) for part in outputs]
                record = CallRecord(type=TYPES[sources[0].dtype])
                with self._declared(flags, Operation.ALL_TO_ALL, record=record):
                    self._run(self._all_to_all(targets, sources))
                copy_back(outputs, targets)

        return call

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Call:
        """`all_to_all` of the parts of two tensors, split along dimension 0."""
        outputs = split_rows(output, output_splits, self.hosts.ranks, "output")
        return self.all_to_all(outputs, split_rows(tensor, input_splits, self.hosts.ranks, "input"))

    # ---- what they are made of ----

    @contextmanager
    def _declared(
        self,
        flags: int,
        operation: Operation,
        tensor: Tensor | None = None,
        *,
        op: int = 0,
        root: int = -1,
        split: Sequence[int] = (),
        record: CallRecord | None = None,
    ) -> Iterator[None]:
        """Agree with all ranks on the call that is to be made.

        With those of this host before anything else; with the other hosts' before anything from them is used,
        but what they are sent need not wait for it.
        """
        call = record or CallRecord()
        call.operation, call.op, call.root = operation, op, root
        if tensor is not None:
            call.type = TYPES[tensor.dtype]
            call.count = call.count or tensor.numel()
        if split:
            call.layout = _fingerprint(split)
        self._deadline = time.monotonic() + self.host.call_timeout_s
        try:
            self.host.check(self.host.core.frd_declare(self.host.handle, ctypes.byref(call), flags))
            self._agreement = Running(self.hosts.agree())
            yield
            self._agreement.finish(self._deadline)
        finally:
            self.hosts.release()
            if self.host.handle:
                self.host.core.frd_undeclare(self.host.handle)

    def _run(self, steps: Steps) -> None:
        self._finish(Running(steps))

    def _finish(self, running: Running | None) -> None:
        if running is not None:
            self._agreement.finish(self._deadline)
            running.finish(self._deadline)

    def _all_reduce(self, flat: Tensor, reduction: int, flags: int) -> None:
        if reduction == _AVG:
            self._average(flat, flags)
            return
        combine = self._combine(flat.dtype, reduction)

        def lead(share: Tensor) -> Steps:
            size = share.numel() * share.element_size()
            return self._choice.all_reduce(self.hosts.count, size)(self.hosts.leg, share, combine)

        self._reduce_in_windows(flat, reduction, lead, flags)

    def _average(self, flat: Tensor, flags: int) -> None:
        """A sum, divided at the end; before the hosts are added where the sum may be too large for the type."""
        n = self.hosts.ranks
        if not flat.dtype.is_floating_point:
            wide = flat.to(torch.int64)
            self._all_reduce(wide, _SUM, flags)
            flat.copy_(wide.div_(n, rounding_mode="trunc"))
        elif flat.element_size() >= 4:
            self._all_reduce(flat, _SUM, flags)
            flat.div_(n)
        else:
            wide = flat.to(torch.float32)
            self._all_reduce(wide, _SUM, flags)
            flat.copy_(wide.div_(n))

    def _reduce_in_windows(
        self, flat: Tensor, reduction: int, lead: Callable[[Tensor], Steps], flags: int
    ) -> None:
        """Reduce inside the host, `lead` this rank's share over the hosts, spread the results; in a pipeline."""
        length = max(1, WINDOW_BYTES // flat.element_size())
        under_way: deque[tuple[list[Tensor], Running | None]] = deque()
        for window in flat.split(length) if flat.numel() else ():
            shares = self._shares(window)
            own = shares[self.host.rank]
            self._host_reduce_scatter(shares, own, reduction, flags)
            under_way.append((shares, Running(lead(own)) if own.numel() else None))
            if len(under_way) > WINDOWS_AHEAD:
                self._complete(*under_way.popleft(), flags)
        while under_way:
            self._complete(*under_way.popleft(), flags)

    def _complete(self, shares: list[Tensor], leg: Running | None, flags: int) -> None:
        self._finish(leg)
        self._host_all_gather(shares[self.host.rank], shares, flags)

    def _shares(self, flat: Tensor) -> list[Tensor]:
        """A tensor in one share per rank of this host; those of ranks that do not lead are empty."""
        leaders = self.hosts.leaders
        return split(flat, leaders) + [flat[:0]] * (self.host.size - leaders)

    def _reduce_scatter(
        self, source: Tensor, counts: Sequence[int], own: Tensor, reduction: int, flags: int
    ) -> None:
        if reduction == _AVG and (not source.dtype.is_floating_point or source.element_size() < 4):
            wide = source.to(torch.float32 if source.dtype.is_floating_point else torch.int64)
            result = torch.empty(own.numel(), dtype=wide.dtype)
            self._reduce_scatter(wide, counts, result, _SUM, flags)
            whole = not source.dtype.is_floating_point
            own.copy_(result.div_(self.hosts.ranks, rounding_mode="trunc" if whole else None))
            return
        in_core = _SUM if reduction == _AVG else reduction
        pieces = []  # this leader's share of what is for each host
        for block in self.hosts.blocks(source, counts):
            shares = self._shares(block)
            piece = torch.empty_like(shares[self.host.rank])
            self._host_reduce_scatter(shares, piece, in_core, flags)
            pieces.append(piece)
        if self.hosts.leads:
            combine = self._combine(source.dtype, in_core)
            self._run(ring_reduce_scatter(self.hosts.leg, pieces, combine))
        block = torch.empty(sum(counts[r] for r in self.host.members), dtype=source.dtype)
        self._host_all_gather(pieces[self.hosts.index], self._shares(block), flags)
        before = sum(counts[r] for r in self.host.members[: self.host.rank])
        own.copy_(block[before : before + own.numel()])
        if reduction == _AVG:
            own.div_(self.hosts.ranks)

    def _all_gather(
        self, source: Tensor, counts: Sequence[int], targets: Sequence[Tensor], flags: int
    ) -> None:
        whole = torch.empty(sum(counts), dtype=source.dtype)
        blocks = self.hosts.blocks(whole, counts)
        own_block = list(blocks[self.hosts.index].split([counts[r] for r in self.host.members]))
        self._host_all_gather(source, own_block, flags)
        shares = [self._shares(block) for block in blocks]
        if self.hosts.leads:
            self._run(ring_all_gather(self.hosts.leg, [each[self.host.rank] for each in shares]))
        for index, each in enumerate(shares):
            if index != self.hosts.index:
                self._host_all_gather(each[self.host.rank], each, flags)
        for members, block in zip(self.hosts.members, blocks, strict=True):
            for rank, part in zip(members, block.split([counts[r] for r in members]), strict=True):
                targets[rank].copy_(part)

    def _broadcast(self, flat: Tensor, root: int, flags: int) -> None:
        home = self.hosts.index_of(root)
        length = max(1, WINDOW_BYTES // flat.element_size())
        under_way: deque[tuple[list[Tensor], Running | None]] = deque()

        def complete(shares: list[Tensor], leg: Running | None) -> None:
            self._finish(leg)
            if self.hosts.index != home:
                self._host_all_gather(shares[self.host.rank], shares, flags)

        for window in flat.split(length) if flat.numel() else ():
            if self.hosts.index == home:
                self._host_broadcast(window, self.host.members.index(root), flags)
            shares = self._shares(window)
            own = shares[self.host.rank]
            leg = Running(tree.broadcast(self.hosts.leg, own, home)) if own.numel() else None
            under_way.append((shares, leg))
            if len(under_way) > WINDOWS_AHEAD:
                complete(*under_way.popleft())
        while under_way:
            complete(*under_way.popleft())

    def _gather(self, source: Tensor, targets: Sequence[Tensor], root: int) -> Steps:
        if self.host.group_rank != root:
            yield self.hosts.all.send(source, root)
            return
        arrivals = [self.hosts.all.recv(target, r) for r, target in enumerate(targets) if r != root]
        targets[root].copy_(source.view(targets[root].shape))
        yield from arrivals

    def _scatter(self, target: Tensor, sources: Sequence[Tensor], root: int) -> Steps:
        if self.host.group_rank != root:
            yield self.hosts.all.recv(target, root)
            return
        departures = [self.hosts.all.send(source, r) for r, source in enumerate(sources) if r != root]
        target.copy_(sources[root].view(target.shape))
        yield from departures

    def _all_to_all(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Steps:
        me, n = self.host.group_rank, self.hosts.ranks
        # everybody begins with another rank, so that nobody is sent to by all at once
        turns = [(me + turn) % n for turn in range(1, n)]
        arrivals = [self.hosts.all.recv(targets[(me - turn) % n], (me - turn) % n) for turn in range(1, n)]
        departures = [self.hosts.all.send(sources[r], r) for r in turns]
        if targets[me].numel() != sources[me].numel():
            raise ValueError(
                f"all_to_all: this rank's part for itself has {sources[me].numel()} elements where it is sent "
                f"and {targets[me].numel()} where it is received"
            )
        targets[me].copy_(sources[me].view(targets[me].shape))
        yield from arrivals
        yield from departures

    # ---- the core, inside the host ----

    def _combine(self, dtype: torch.dtype, reduction: int) -> Combine:
        """The core's reduction of two tensors: on one thread, as those of torch would wait for each other's turn."""
        core, kind = self.host.core, TYPES[dtype]

        def combine(result: Tensor, a: Tensor, b: Tensor) -> None:
            count = result.numel()
            core.frd_combine(result.data_ptr(), a.data_ptr(), b.data_ptr(), count, kind, reduction)

        return combine

    def _host_reduce_scatter(self, parts: Sequence[Tensor], own: Tensor, reduction: int, flags: int) -> None:
        host = self.host
        pointers, counts = pointers_to(parts), counts_of(parts)
        kind = TYPES[own.dtype]
        host.check(
            host.core.frd_reduce_scatter(
                host.handle, pointers, counts, own.data_ptr(), kind, reduction, flags
            )
        )

    def _host_all_gather(self, own: Tensor, parts: Sequence[Tensor], flags: int) -> None:
        host = self.host
        pointers, counts = pointers_to(parts), counts_of(parts)
        kind = TYPES[own.dtype]
        host.check(host.core.frd_all_gather(host.handle, own.data_ptr(), pointers, counts, kind, flags))

    def _host_broadcast(self, flat: Tensor, root: int, flags: int) -> None:
        host = self.host
        host.check(
            host.core.frd_broadcast(
                host.handle, flat.data_ptr(), flat.numel(), TYPES[flat.dtype], root, flags
            )
        )


def _fingerprint(counts: Sequence[int]) -> int:
    """Tells lists of counts apart; never 0, which stands for none."""
    return zlib.crc32(array("q", counts)) or 1
