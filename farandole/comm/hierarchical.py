"""The operations of ranks on several hosts: shared memory inside a host, messages between the leaders of all hosts.

On every host the first `leaders` ranks lead, each its own share of a tensor.  Shared memory collects the share of
leader l on the host, the l-th leaders of all hosts reduce it, all leaders at once, and shared memory distributes the
results.  A link therefore carries each byte once, whatever the number of ranks behind it, and all ranks of a host
keep the link busy.  A large tensor is divided into windows: the link works on some windows while shared memory works
on others.

M. Bayatpour et al.: Scalable reduction collectives with data partitioning-based multi-leader design (SC 2017).
"""

from __future__ import annotations

import ctypes
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise

import torch
from torch import Tensor

from farandole.comm.algorithms import tree
from farandole.comm.algorithms.choice import Choice
from farandole.comm.algorithms.ring import all_gather as ring_all_gather
from farandole.comm.algorithms.ring import reduce_scatter as ring_reduce_scatter
from farandole.comm.algorithms.steps import Combine, Running, Steps, split
from farandole.comm.compression.base import Compressor
from farandole.comm.core import GroupCore, Parts
from farandole.comm.dense import counts_of, pointers_to
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.errors import CommunicationError
from farandole.comm.host_group import HostGroup
from farandole.comm.hosts import Hosts
from farandole.comm.reduce_rows import reduce_rows
from farandole.comm.transport import Tagged, Transport
from farandole.native import Call as CallRecord
from farandole.native import Operation

WINDOW_BYTES = 2 << 20
"""How many bytes of a tensor, over all ranks of a host, one window has."""
WINDOWS_AHEAD = 4
"""How many windows may wait for the link while shared memory continues with the next."""

Window = tuple[list[Tensor], Callable[[Tensor, Transport], Steps]]
"""A piece of a tensor in shares, one per rank of this host, and how its leader reduces one share over the hosts."""

_SUM, _AVG = REDUCTION_NAMES.index("sum"), REDUCTION_NAMES.index("avg")


class HierarchicalCore(GroupCore):
    """The operations of a group on several hosts."""

    def __init__(self, hosts: Hosts, choice: Choice) -> None:
        super().__init__(hosts.host)
        self.hosts = hosts
        self._choice = choice
        self._deadline = 0.0  # of the call under way
        self._agreement = Running(iter(()))

    # ---- collectives ----

    def barrier(self, flags: int) -> None:
        """Wait until every rank has called it."""
        with self._declared(flags, Operation.BARRIER):
            token = torch.zeros(1, dtype=torch.uint8)
            self._all_reduce(token, REDUCTION_NAMES.index("max"), flags)

    def all_reduce(self, output: Tensor, input: Tensor, reduction: int, flags: int) -> None:
        """Reduce `input` over all ranks into `output`."""
        if output is not input:
            output.copy_(input.view(output.shape))
        flat = output.view(-1)
        with self._declared(flags, Operation.ALL_REDUCE, flat, op=reduction):
            self._all_reduce(flat, reduction, flags)

    def all_reduce_compressed(self, tensor: Tensor, op: str, compressor: Compressor, flags: int) -> None:
        """Sum or average a dense tensor of floats, in place, compressed between hosts."""
        flat = tensor.view(-1)
        signature, reduction = compressor.signature, REDUCTION_NAMES.index(op)
        with self._declared(flags, Operation.ALL_REDUCE, flat, op=reduction, split=signature):
            wide = flat.float()  # fp32 tensors themselves
            self._all_reduce_compressed(wide, op == "avg", compressor, flags)
            if wide is not flat:
                flat.copy_(wide)

    def reduce(self, output: Tensor | None, input: Tensor, reduction: int, root: int, flags: int) -> None:
        """Reduce `input` into `output` of rank `root`."""
        flat = input.view(-1).clone()
        with self._declared(flags, Operation.REDUCE, flat, op=reduction, root=root):
            self._all_reduce(flat, reduction, flags)
        if output is not None:
            output.copy_(flat.view(output.shape))

    def reduce_scatter(self, output: Tensor, inputs: Parts, reduction: int, flags: int) -> None:
        """Reduce `inputs` and keep this rank's part."""
        own = output.view(-1)
        if len(inputs) == 1:
            source, counts, uneven = inputs[0].view(-1), [own.numel()] * self.size, []
        else:
            flats = [part.reshape(-1) for part in inputs]
            source, counts = torch.cat(flats), [flat.numel() for flat in flats]
            uneven = counts
        with self._declared(flags, Operation.REDUCE_SCATTER, source, op=reduction, split=uneven):
            self._reduce_scatter(source, counts, own, reduction, flags)

    def all_gather(self, outputs: Parts, input: Tensor, flags: int) -> None:
        """Collect every rank's `input` in `outputs`."""
        source = input.view(-1)
        if len(outputs) == 1:
            counts = [source.numel()] * self.size
            targets, record = list(outputs[0].view(-1).split(counts)), CallRecord()
        else:
            targets = [output.view(-1) for output in outputs]
            counts = [target.numel() for target in targets]
            record = CallRecord(count=sum(counts), layout=_fingerprint(counts))
        with self._declared(flags, Operation.ALL_GATHER, source, record=record):
            self._all_gather(source, counts, targets, flags)

    def broadcast(self, output: Tensor | None, input: Tensor | None, root: int, flags: int) -> None:
        """Copy `input` of rank `root` to `output` of the others."""
        tensor = output if input is None else input
        assert tensor is not None
        with self._declared(flags, Operation.BROADCAST, tensor, root=root):
            self._broadcast(tensor.view(-1), root, flags)

    def gather(
        self, outputs: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int] | None, flags: int
    ) -> None:
        """Collect every rank's `input` in `outputs` of rank `root`."""
        record = _record_of(input, counts)
        with self._declared(flags, Operation.GATHER, root=root, record=record):
            self._run(self._gather(input, outputs, root))

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor], root: int, counts: Sequence[int] | None, flags: int
    ) -> None:
        """Give rank r the tensor `inputs[r]` of rank `root`."""
        record = _record_of(output, counts)
        with self._declared(flags, Operation.SCATTER, root=root, record=record):
            self._run(self._scatter(output, inputs, root))

    def all_to_all(self, outputs: Parts, inputs: Parts, flags: int) -> None:
        """Send input j to rank j and receive output i from rank i."""
        if len(inputs) == 1:
            outputs = outputs[0].view(-1).tensor_split(self.size)
            inputs = inputs[0].view(-1).tensor_split(self.size)
        record = CallRecord(type=TYPES[inputs[0].dtype])
        with self._declared(flags, Operation.ALL_TO_ALL, record=record):
            self._run(self._all_to_all(outputs, inputs))

    def scan(self, output: Tensor, input: Tensor, reduction: int, exclusive: bool, flags: int) -> None:
        """Reduce the inputs of ranks 0 to this one (without this one if `exclusive`)."""
        rows = input.new_empty(self.size, input.numel())
        self.all_gather([rows], input, flags)
        last = self.rank - exclusive
        if last >= 0:
            output.copy_(reduce_rows(rows[: last + 1], reduction).view(output.shape))

    # ---- data movement, after the ranks have agreed on the call ----

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
        """Agree with all ranks on the call.

        The ranks of this host agree before anything else.  The hosts agree before a host uses data of another host;
        data may be sent before.
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
        except CommunicationError as error:  # a transport's own is not known to the others yet
            self.host.fail(error, self.host.group_rank)
        finally:
            self.hosts.release()
            if self.host.handle:
                self.host.core.frd_undeclare(self.host.handle)

    def _run(self, steps: Steps) -> None:
        """Run the steps of an algorithm over hosts, after the hosts have agreed on the call."""
        self._finish(Running(steps))

    def _finish(self, running: Running | None) -> None:
        if running is not None:
            self._agreement.finish(self._deadline)
            running.finish(self._deadline)

    def _all_reduce(self, flat: Tensor, reduction: int, flags: int) -> None:
        """Reduce over all ranks, in place."""
        if reduction == _AVG:
            self._average(flat, flags)
            return
        self._reduce_in_windows(self._windows(flat, reduction), reduction, flags)

    def _windows(self, flat: Tensor, reduction: int) -> Iterator[Window]:
        """Divide a tensor into windows that the chosen algorithm reduces."""
        length = max(1, WINDOW_BYTES // flat.element_size())
        for window in flat.split(length) if flat.numel() else ():
            yield self._shares(window), partial(self._lead, reduction=reduction)

    def _lead(self, share: Tensor, link: Transport, reduction: int) -> Steps:
        size = share.numel() * share.element_size()
        combine = combine_in_core(self.host, share.dtype, reduction)
        return self._choice.all_reduce(self.hosts.count, size)(link, share, combine)

    def _all_reduce_compressed(
        self, flat: Tensor, averages: bool, compressor: Compressor, flags: int
    ) -> None:
        """Sum or average, compressed between hosts."""
        factor = 1 / self.hosts.ranks if averages else 1.0
        exact = flat[flat.numel() - compressor.exact :]
        windows = chain(self._compressed_windows(flat, factor, compressor), self._windows(exact, _SUM))
        self._reduce_in_windows(windows, _SUM, flags)
        if averages:
            exact.div_(self.hosts.ranks)

    def _compressed_windows(self, flat: Tensor, factor: float, compressor: Compressor) -> Iterator[Window]:
        spare = [flat[:0]] * (self.host.size - self.hosts.leaders)
        for bounds in compressor.windows(self.hosts.leaders, WINDOW_BYTES // flat.element_size()):
            start = bounds[min(self.host.rank, self.hosts.leaders)]
            exactly = partial(self._lead, reduction=_SUM)
            lead = partial(compressor.reduce, start=start, factor=factor, exactly=exactly)
            yield [flat[a:b] for a, b in pairwise(bounds)] + spare, lead

    def _average(self, flat: Tensor, flags: int) -> None:
        """Sum and divide; in a wider type where the sum may overflow."""
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

    def _reduce_in_windows(self, windows: Iterable[Window], reduction: int, flags: int) -> None:
        """Reduce inside the host, reduce this rank's shares over the hosts, distribute the results: a pipeline.

        Windows advance in turns: the second message of one window is sent while the first of later windows arrive.
        """
        under_way: deque[tuple[list[Tensor], Running]] = deque()
        waiting: deque[Running] = deque()  # in the order in which messages arrive

        def complete(shares: list[Tensor], link: Running) -> None:
            while not link.done:
                self._agreement.finish(self._deadline)
                first = waiting.popleft()
                first.advance(self._deadline)
                if not first.done:
                    waiting.append(first)
            self._host_all_gather(shares[self.host.rank], shares, flags)

        for number, (shares, lead) in enumerate(windows):
            own = shares[self.host.rank]
            self._host_reduce_scatter(shares, own, reduction, flags)
            link = Running(lead(own, Tagged(self.hosts.transport, number)) if own.numel() else iter(()))
            under_way.append((shares, link))
            if not link.done:
                waiting.append(link)
            if len(under_way) > WINDOWS_AHEAD:
                complete(*under_way.popleft())
        while under_way:
            complete(*under_way.popleft())

    def _shares(self, flat: Tensor) -> list[Tensor]:
        """Divide a tensor into one share per rank of this host; only leaders have elements."""
        leaders = self.hosts.leaders
        return split(flat, leaders) + [flat[:0]] * (self.host.size - leaders)

    def _reduce_scatter(
        self, source: Tensor, counts: Sequence[int], own: Tensor, reduction: int, flags: int
    ) -> None:
        """Reduce `source`, of `counts[r]` elements for rank r, and put this rank's part into `own`."""
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
            combine = combine_in_core(self.host, source.dtype, in_core)
            self._run(ring_reduce_scatter(self.hosts.transport, pieces, combine))
        block = torch.empty(sum(counts[r] for r in self.host.members), dtype=source.dtype)
        self._host_all_gather(pieces[self.hosts.index], self._shares(block), flags)
        before = sum(counts[r] for r in self.host.members[: self.host.rank])
        own.copy_(block[before : before + own.numel()])
        if reduction == _AVG:
            own.div_(self.hosts.ranks)

    def _all_gather(
        self, source: Tensor, counts: Sequence[int], targets: Sequence[Tensor], flags: int
    ) -> None:
        """Put `source` of rank r, of `counts[r]` elements, into `targets[r]` on all ranks."""
        whole = torch.empty(sum(counts), dtype=source.dtype)
        blocks = self.hosts.blocks(whole, counts)
        own_block = list(blocks[self.hosts.index].split([counts[r] for r in self.host.members]))
        self._host_all_gather(source, own_block, flags)
        shares = [self._shares(block) for block in blocks]
        if self.hosts.leads:
            self._run(ring_all_gather(self.hosts.transport, [each[self.host.rank] for each in shares]))
        for index, each in enumerate(shares):
            if index != self.hosts.index:
                self._host_all_gather(each[self.host.rank], each, flags)
        for members, block in zip(self.hosts.members, blocks, strict=True):
            for rank, part in zip(members, block.split([counts[r] for r in members]), strict=True):
                targets[rank].copy_(part)

    def _broadcast(self, flat: Tensor, root: int, flags: int) -> None:
        """Copy the values of rank `root` to all ranks, in windows."""
        source = self.hosts.index_of(root)
        length = max(1, WINDOW_BYTES // flat.element_size())
        under_way: deque[tuple[list[Tensor], Running | None]] = deque()

        def complete(shares: list[Tensor], link: Running | None) -> None:
            self._finish(link)
            if self.hosts.index != source:
                self._host_all_gather(shares[self.host.rank], shares, flags)

        for window in flat.split(length) if flat.numel() else ():
            if self.hosts.index == source:
                self._host_broadcast(window, self.host.members.index(root), flags)
            shares = self._shares(window)
            own = shares[self.host.rank]
            link = Running(tree.broadcast(self.hosts.transport, own, source)) if own.numel() else None
            under_way.append((shares, link))
            if len(under_way) > WINDOWS_AHEAD:
                complete(*under_way.popleft())
        while under_way:
            complete(*under_way.popleft())

    def _gather(self, source: Tensor, targets: Sequence[Tensor], root: int) -> Steps:
        """Send every rank's `source` to rank `root`, one message each."""
        if self.host.group_rank != root:
            yield self.hosts.all.send(source, root)
            return
        arrivals = [self.hosts.all.recv(target, r) for r, target in enumerate(targets) if r != root]
        targets[root].copy_(source.view(targets[root].shape))
        yield from arrivals

    def _scatter(self, target: Tensor, sources: Sequence[Tensor], root: int) -> Steps:
        """Send `sources` of rank `root`, one message each."""
        if self.host.group_rank != root:
            yield self.hosts.all.recv(target, root)
            return
        departures = [self.hosts.all.send(source, r) for r, source in enumerate(sources) if r != root]
        target.copy_(sources[root].view(target.shape))
        yield from departures

    def _all_to_all(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Steps:
        """Exchange one message for each pair of ranks."""
        me, n = self.host.group_rank, self.hosts.ranks
        # every rank begins with another peer, so that no rank receives from all at once
        turns = [(me + turn) % n for turn in range(1, n)]
        arrivals = [self.hosts.all.recv(targets[(me - turn) % n], (me - turn) % n) for turn in range(1, n)]
        departures = [self.hosts.all.send(sources[r], r) for r in turns]
        targets[me].copy_(sources[me].view(targets[me].shape))
        yield from arrivals
        yield from departures

    # ---- the core, inside the host ----

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


def combine_in_core(host: HostGroup, dtype: torch.dtype, reduction: int) -> Combine:
    """Return the C core's reduction of two tensors; it uses one thread, as torch's threads would compete."""
    core, kind = host.core, TYPES[dtype]

    def combine(result: Tensor, a: Tensor, b: Tensor) -> None:
        count = result.numel()
        core.frd_combine(result.data_ptr(), a.data_ptr(), b.data_ptr(), count, kind, reduction)

    return combine


def _fingerprint(counts: Sequence[int]) -> int:
    """Return a number that distinguishes lists of counts; never 0, which stands for none."""
    return zlib.crc32(array("q", counts)) or 1


def _record_of(tensor: Tensor, counts: Sequence[int] | None) -> CallRecord:
    """Describe a gather or a scatter: with equal counts, or with the counts of all ranks."""
    if counts is None:
        return CallRecord(type=TYPES[tensor.dtype], count=tensor.numel())
    return CallRecord(type=TYPES[tensor.dtype], count=sum(counts), layout=_fingerprint(counts))
