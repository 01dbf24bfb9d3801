"""How a tensor goes over several hosts: shared memory inside a host, messages between the leaders of all hosts.

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
from farandole.comm.dense import counts_of, pointers_to
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.errors import CommunicationError
from farandole.comm.host_group import HostGroup
from farandole.comm.hosts import Hosts
from farandole.comm.transport import Tagged, Transport
from farandole.native import Call as CallRecord
from farandole.native import Operation

WINDOW_BYTES = 2 << 20
"""How much of a tensor, over all ranks of a host, is under way in one piece."""
WINDOWS_AHEAD = 4
"""How many windows may wait for the link while shared memory goes on with the next."""

Window = tuple[list[Tensor], Callable[[Tensor, Transport], Steps]]
"""A piece of a tensor in shares, one per rank of this host, and how its leader reduces one over the hosts."""

_SUM, _AVG = REDUCTION_NAMES.index("sum"), REDUCTION_NAMES.index("avg")


class TwoLevels:
    """The ways of dense tensors over the hosts of a group; each is walked inside `declared`."""

    def __init__(self, hosts: Hosts, choice: Choice) -> None:
        self.hosts = hosts
        self.host = hosts.host
        self._choice = choice
        self._deadline = 0.0  # of the call under way
        self._agreement = Running(iter(()))

    @contextmanager
    def declared(
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
            call.layout = fingerprint(split)
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

    def run(self, steps: Steps) -> None:
        """Go through the steps of an algorithm over hosts, after the hosts have agreed on the call."""
        self._finish(Running(steps))

    def _finish(self, running: Running | None) -> None:
        if running is not None:
            self._agreement.finish(self._deadline)
            running.finish(self._deadline)

    def all_reduce(self, flat: Tensor, reduction: int, flags: int) -> None:
        """Reduce over all ranks, in place."""
        if reduction == _AVG:
            self._average(flat, flags)
            return
        self._reduce_in_windows(self._windows(flat, reduction), reduction, flags)

    def _windows(self, flat: Tensor, reduction: int) -> Iterator[Window]:
        """A tensor, to be reduced by the algorithm of the user's choice."""
        length = max(1, WINDOW_BYTES // flat.element_size())
        for window in flat.split(length) if flat.numel() else ():
            yield self._shares(window), partial(self._lead, reduction=reduction)

    def _lead(self, share: Tensor, leg: Transport, reduction: int) -> Steps:
        size = share.numel() * share.element_size()
        combine = combine_in_core(self.host, share.dtype, reduction)
        return self._choice.all_reduce(self.hosts.count, size)(leg, share, combine)

    def all_reduce_compressed(self, flat: Tensor, averages: bool, compressor: Compressor, flags: int) -> None:
        """A sum or an average, compressed where it crosses hosts."""
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
        """A sum, divided at the end; before the hosts are added where the sum may be too large for the type."""
        n = self.hosts.ranks
        if not flat.dtype.is_floating_point:
            wide = flat.to(torch.int64)
            self.all_reduce(wide, _SUM, flags)
            flat.copy_(wide.div_(n, rounding_mode="trunc"))
        elif flat.element_size() >= 4:
            self.all_reduce(flat, _SUM, flags)
            flat.div_(n)
        else:
            wide = flat.to(torch.float32)
            self.all_reduce(wide, _SUM, flags)
            flat.copy_(wide.div_(n))

    def _reduce_in_windows(self, windows: Iterable[Window], reduction: int, flags: int) -> None:
        """Reduce inside the host, lead this rank's shares over the hosts, spread the results; in a pipeline.

        Legs go on in turns, so that a second message of one window is sent while first ones of later windows come.
        """
        under_way: deque[tuple[list[Tensor], Running]] = deque()
        waiting: deque[Running] = deque()  # in the order in which their messages come

        def complete(shares: list[Tensor], leg: Running) -> None:
            while not leg.done:
                self._agreement.finish(self._deadline)
                first = waiting.popleft()
                first.advance(self._deadline)
                if not first.done:
                    waiting.append(first)
            self._host_all_gather(shares[self.host.rank], shares, flags)

        for number, (shares, lead) in enumerate(windows):
            own = shares[self.host.rank]
            self._host_reduce_scatter(shares, own, reduction, flags)
            leg = Running(lead(own, Tagged(self.hosts.leg, number)) if own.numel() else iter(()))
            under_way.append((shares, leg))
            if not leg.done:
                waiting.append(leg)
            if len(under_way) > WINDOWS_AHEAD:
                complete(*under_way.popleft())
        while under_way:
            complete(*under_way.popleft())

    def _shares(self, flat: Tensor) -> list[Tensor]:
        """A tensor in one share per rank of this host; those of ranks that do not lead are empty."""
        leaders = self.hosts.leaders
        return split(flat, leaders) + [flat[:0]] * (self.host.size - leaders)

    def reduce_scatter(
        self, source: Tensor, counts: Sequence[int], own: Tensor, reduction: int, flags: int
    ) -> None:
        """Reduce `source`, of `counts[r]` elements for rank r, and put this rank's part into `own`."""
        if reduction == _AVG and (not source.dtype.is_floating_point or source.element_size() < 4):
            wide = source.to(torch.float32 if source.dtype.is_floating_point else torch.int64)
            result = torch.empty(own.numel(), dtype=wide.dtype)
            self.reduce_scatter(wide, counts, result, _SUM, flags)
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
            self.run(ring_reduce_scatter(self.hosts.leg, pieces, combine))
        block = torch.empty(sum(counts[r] for r in self.host.members), dtype=source.dtype)
        self._host_all_gather(pieces[self.hosts.index], self._shares(block), flags)
        before = sum(counts[r] for r in self.host.members[: self.host.rank])
        own.copy_(block[before : before + own.numel()])
        if reduction == _AVG:
            own.div_(self.hosts.ranks)

    def all_gather(
        self, source: Tensor, counts: Sequence[int], targets: Sequence[Tensor], flags: int
    ) -> None:
        """Put `source` of rank r, of `counts[r]` elements, into `targets[r]` on all ranks."""
        whole = torch.empty(sum(counts), dtype=source.dtype)
        blocks = self.hosts.blocks(whole, counts)
        own_block = list(blocks[self.hosts.index].split([counts[r] for r in self.host.members]))
        self._host_all_gather(source, own_block, flags)
        shares = [self._shares(block) for block in blocks]
        if self.hosts.leads:
            self.run(ring_all_gather(self.hosts.leg, [each[self.host.rank] for each in shares]))
        for index, each in enumerate(shares):
            if index != self.hosts.index:
                self._host_all_gather(each[self.host.rank], each, flags)
        for members, block in zip(self.hosts.members, blocks, strict=True):
            for rank, part in zip(members, block.split([counts[r] for r in members]), strict=True):
                targets[rank].copy_(part)

    def broadcast(self, flat: Tensor, root: int, flags: int) -> None:
        """Copy the values of rank `root` to all ranks, in windows."""
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

    def gather(self, source: Tensor, targets: Sequence[Tensor], root: int) -> Steps:
        """Every rank's `source` into `targets` of rank `root`; one message each."""
        if self.host.group_rank != root:
            yield self.hosts.all.send(source, root)
            return
        arrivals = [self.hosts.all.recv(target, r) for r, target in enumerate(targets) if r != root]
        targets[root].copy_(source.view(targets[root].shape))
        yield from arrivals

    def scatter(self, target: Tensor, sources: Sequence[Tensor], root: int) -> Steps:
        """`sources` of rank `root`, one for each rank; one message each."""
        if self.host.group_rank != root:
            yield self.hosts.all.recv(target, root)
            return
        departures = [self.hosts.all.send(source, r) for r, source in enumerate(sources) if r != root]
        target.copy_(sources[root].view(target.shape))
        yield from departures

    def all_to_all(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Steps:
        """Part j to rank j, part i from rank i; one message for each pair."""
        me, n = self.host.group_rank, self.hosts.ranks
        # everybody begins with another rank, so that nobody is sent to by all at once
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
    """The core's reduction of two tensors: on one thread, as those of torch would wait for each other's turn."""
    core, kind = host.core, TYPES[dtype]

    def combine(result: Tensor, a: Tensor, b: Tensor) -> None:
        count = result.numel()
        core.frd_combine(result.data_ptr(), a.data_ptr(), b.data_ptr(), count, kind, reduction)

    return combine


def fingerprint(counts: Sequence[int]) -> int:
    """Tells lists of counts apart; never 0, which stands for none."""
    return zlib.crc32(array("q", counts)) or 1
