"""Operations on several hosts, with shared memory within a host and messages between the hosts' leaders.

The first `leaders` ranks of every host are leaders.  A tensor is split into one share per leader.  On each host,
share l is reduced to leader l in shared memory.  The l-th leaders of all hosts then reduce share l over the hosts.
Finally, the result is distributed in shared memory.  All leaders work in parallel and keep the link busy.  A link
carries each byte once, regardless of the number of ranks per host.  A large tensor is split into windows, so that the
link and shared memory process different windows in parallel.

M. Bayatpour et al.: Scalable reduction collectives with data partitioning-based multi-leader design (SC 2017).
"""

from __future__ import annotations

import ctypes
import time
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, pairwise

import torch
from torch import Tensor

from farandole.comm.algorithms import tree
from farandole.comm.algorithms.choice import ALL_REDUCE, Choice
from farandole.comm.algorithms.ring import all_gather as ring_all_gather
from farandole.comm.algorithms.ring import reduce_scatter as ring_reduce_scatter
from farandole.comm.algorithms.steps import Running, Steps, split
from farandole.comm.compression.base import Compressor
from farandole.comm.core import GroupCore, Parts
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.errors import CommunicationError
from farandole.comm.hierarchical.exchange import HostExchange
from farandole.comm.hierarchical.hosts import Hosts
from farandole.comm.hierarchical.windows import (
    WINDOW_BYTES,
    Accumulation,
    Window,
    combine_in_core,
    in_windows,
    windows_of,
)
from farandole.comm.native_core import NativeCore
from farandole.comm.transport import Tagged, Transport
from farandole.native import Call as CallRecord
from farandole.native import Operation

_SUM, _AVG = (REDUCTION_NAMES.index(name) for name in ("sum", "avg"))


class HierarchicalCore(GroupCore):
    """Runs the operations of a group that spans several hosts."""

    def __init__(self, hosts: Hosts, choice: Choice) -> None:
        super().__init__(hosts.host)
        self.hosts = hosts
        self._choice = choice
        self._local = NativeCore(hosts.host)  # operations among the ranks of this host
        self._exchange = HostExchange(hosts, self._local, choice, self._run)
        self._deadline = 0.0  # of the current call
        self._agreement = Running(iter(()))

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return the name of the inter-node algorithm for an operation on `nbytes` bytes."""
        if operation in ("all_to_all", "gather", "scatter"):
            return self._choice.exchange(operation, nbytes // self.size, self.hosts.largest)
        if operation == "all_reduce":
            return self._choice.all_reduce(self.hosts.count, min(nbytes, WINDOW_BYTES) // self.hosts.leaders)
        if operation in ("broadcast", "reduce"):
            size = min(nbytes, WINDOW_BYTES) // self.hosts.leaders
            return "binomial tree" if size < tree.CHAIN_BYTES else "chain"
        return "ring"

    # ---- collectives ----

    def barrier(self, flags: int) -> None:
        """Block until every rank has called this method."""
        with self._declared(flags, Operation.BARRIER):
            token = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._all_reduce(token, REDUCTION_NAMES.index("max"), flags)

    def all_reduce(self, output: Tensor, input: Tensor, reduction: int, flags: int) -> None:
        """Reduce `input` over all ranks into `output`."""
        if output is not input:
            output.copy_(input.view(output.shape))
        flat = output.view(-1)
        with self._declared(flags, Operation.ALL_REDUCE, flat, op=reduction):
            self._all_reduce(flat, reduction, flags)

    def all_reduce_compressed(self, tensor: Tensor, op: str, compressor: Compressor, flags: int) -> None:
        """Sum or average a dense tensor of floats in place, and compress the data that is sent between hosts."""
        flat = tensor.view(-1)
        signature, reduction = compressor.signature, REDUCTION_NAMES.index(op)
        with self._declared(flags, Operation.ALL_REDUCE, flat, op=reduction, split=signature):
            wide = flat.float()  # not a copy if the tensor is fp32
            self._all_reduce_compressed(wide, op == "avg", compressor, flags)
            if wide is not flat:
                flat.copy_(wide)

    def reduce(self, output: Tensor | None, input: Tensor, reduction: int, root: int, flags: int) -> None:
        """Reduce `input` over all ranks into `output` on rank `root`."""
        flat = input.view(-1)
        with self._declared(flags, Operation.REDUCE, flat, op=reduction, root=root):
            self._reduce(flat, flat if output is None else output.view(-1), reduction, root, flags)

    def reduce_scatter(self, output: Tensor, inputs: Parts, reduction: int, flags: int) -> None:
        """Reduce `inputs` over all ranks and store this rank's part in `output`."""
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
        """Gather every rank's `input` into `outputs`."""
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
        """Copy `input` from rank `root` to `output` on the other ranks."""
        tensor = output if input is None else input
        assert tensor is not None
        with self._declared(flags, Operation.BROADCAST, tensor, root=root):
            self._broadcast(tensor.view(-1), root, flags)

    def gather(
        self, outputs: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int] | None, flags: int
    ) -> None:
        """Gather every rank's `input` into `outputs` on rank `root`."""
        record = _record_of(input, counts)
        with self._declared(flags, Operation.GATHER, root=root, record=record):
            all_counts = [input.numel()] * self.size if counts is None else counts
            self._exchange.gather(outputs, input, root, all_counts, flags)

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor], root: int, counts: Sequence[int] | None, flags: int
    ) -> None:
        """Send `inputs[r]` from rank `root` to `output` on rank r."""
        record = _record_of(output, counts)
        with self._declared(flags, Operation.SCATTER, root=root, record=record):
            all_counts = [output.numel()] * self.size if counts is None else counts
            self._exchange.scatter(output, inputs, root, all_counts, flags)

    def all_to_all(self, outputs: Parts, inputs: Parts, flags: int) -> None:
        """Send part j of `inputs` to rank j, and receive part i of `outputs` from rank i."""
        if len(inputs) == 1:
            outputs = outputs[0].view(-1).tensor_split(self.size)
            inputs = inputs[0].view(-1).tensor_split(self.size)
        record = CallRecord(type=TYPES[inputs[0].dtype])
        with self._declared(flags, Operation.ALL_TO_ALL, record=record):
            self._exchange.all_to_all(
                [output.view(-1) for output in outputs], [input.view(-1) for input in inputs], flags
            )

    def agree(self, call: CallRecord, flags: int) -> None:
        """Check that all ranks make the call described by `call`."""
        with self._declared(flags, Operation(call.operation), op=call.op, root=call.root, record=call):
            pass

    # ---- implementation, after the ranks have agreed on the call ----

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
        """Run the `with` block as a collective call, and check that all ranks make the same call."""
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
            # this exchange is complete before any host uses data from another host, but data may be sent earlier
            self._agreement = Running(self.hosts.agree())
            yield
            self._agreement.finish(self._deadline)
        except CommunicationError as error:  # other ranks may not have detected a transport error
            self.host.fail(error, self.host.group_rank)
        except Exception as error:  # for example, out of memory; the other ranks would wait for this rank
            with suppress(CommunicationError):
                self.host.fail(self._own_failure(operation, error), self.host.group_rank)
            raise
        finally:
            self.hosts.release()
            if self.host.handle:
                self.host.core.frd_undeclare(self.host.handle)

    def _own_failure(self, operation: Operation, error: Exception) -> CommunicationError:
        membership = self.host.membership
        return CommunicationError(
            f"{membership.rank(self.host.group_rank)} failed in {operation.name.lower()}() of {membership.group}: "
            f"{type(error).__name__}: {error}"
        )

    def _run(self, steps: Steps) -> None:
        """Wait until the hosts have agreed on the call, then run an inter-node algorithm."""
        self._finish(Running(steps))

    def _finish(self, running: Running | None) -> None:
        if running is not None:
            self._agreement.finish(self._deadline)
            running.finish(self._deadline)

    def _all_reduce(self, flat: Tensor, reduction: int, flags: int) -> None:
        """All-reduce `flat` in place."""
        how = Accumulation.of(flat.dtype, reduction, self.size)
        self._reduce_in_windows(self._windows(flat, how), how.reduction, flags)

    def _windows(self, flat: Tensor, how: Accumulation) -> Iterator[Window]:
        for window in windows_of(flat, how):
            results = self._shares(window)
            shares = results if how.dtype is flat.dtype else self._shares(window.to(how.dtype))
            yield Window(shares, results, partial(self._lead, how=how, result=results[self.host.rank]))

    def _lead(self, share: Tensor, link: Transport, how: Accumulation, result: Tensor) -> Steps:
        name = self._choice.all_reduce(self.hosts.count, share.numel() * share.element_size())
        combine = combine_in_core(self.host, share.dtype, how.reduction)
        return ALL_REDUCE[name](link, share, combine, result, how.store)

    def _all_reduce_compressed(
        self, flat: Tensor, averages: bool, compressor: Compressor, flags: int
    ) -> None:
        """All-reduce `flat` in place; between hosts, compress all but the last `compressor.exact` elements."""
        factor = 1 / self.hosts.ranks if averages else 1.0
        exact = flat[flat.numel() - compressor.exact :]
        how = Accumulation.of(flat.dtype, _AVG if averages else _SUM, self.size)
        windows = chain(self._compressed_windows(flat, factor, compressor), self._windows(exact, how))
        self._reduce_in_windows(windows, _SUM, flags)

    def _compressed_windows(self, flat: Tensor, factor: float, compressor: Compressor) -> Iterator[Window]:
        spare = [flat[:0]] * (self.host.size - self.hosts.leaders)
        how = Accumulation.of(flat.dtype, _SUM, self.size)
        for bounds in compressor.windows(self.hosts.leaders, WINDOW_BYTES // flat.element_size()):
            start = bounds[min(self.host.rank, self.hosts.leaders)]

            def exactly(share: Tensor, link: Transport) -> Steps:
                return self._lead(share, link, how, share)

            shares = [flat[a:b] for a, b in pairwise(bounds)] + spare
            yield Window(
                shares, shares, partial(compressor.reduce, start=start, factor=factor, exactly=exactly)
            )

    def _reduce_in_windows(self, windows: Iterable[Window], reduction: int, flags: int) -> None:
        """Reduce `windows` over all ranks in a pipeline."""
        me = self.host.rank
        waiting: deque[Running] = deque()  # in the order of message arrival

        def begin(number: int, window: Window) -> tuple[Window, Running]:
            own = window.shares[me]
            self._local.reduce_scatter(own, window.shares, reduction, flags)
            steps = window.lead(own, Tagged(self.hosts.transport, number)) if own.numel() else iter(())
            link = Running(steps)
            if not link.done:
                waiting.append(link)
            return window, link

        def complete(window: Window, link: Running) -> None:
            # take turns, so the second message of a window is sent while the first messages of later windows arrive
            while not link.done:
                self._agreement.finish(self._deadline)
                first = waiting.popleft()
                first.advance(self._deadline)
                if not first.done:
                    waiting.append(first)
            self._local.all_gather(window.results, window.results[me], flags)

        in_windows(windows, begin, complete)

    def _reduce(self, source: Tensor, target: Tensor, reduction: int, root: int, flags: int) -> None:
        how = Accumulation.of(source.dtype, reduction, self.size)
        combine = combine_in_core(self.host, how.dtype, how.reduction)
        root_host, me = self.hosts.index_of(root), self.host.rank
        results = windows_of(target, how)

        def begin(number: int, window: Tensor) -> tuple[Tensor, Tensor, Running]:
            shares = self._shares(window.to(how.dtype))
            own = torch.empty_like(shares[me])  # only the root's tensor may be overwritten
            self._local.reduce_scatter(own, shares, how.reduction, flags)
            steps: Steps = iter(())
            if own.numel():
                steps = tree.reduce(Tagged(self.hosts.transport, number), own, root_host, combine)
            return next(results), own, Running(steps)

        def complete(result: Tensor, own: Tensor, link: Running) -> None:
            self._finish(link)
            if self.hosts.index != root_host:
                return
            parts = self._shares(result)
            narrow = own if how.dtype is result.dtype else torch.empty_like(parts[me])
            if how.store:
                how.store(narrow, own)
            is_root = self.host.group_rank == root
            counts = [part.numel() for part in parts]
            self._local.gather(parts if is_root else [], narrow, self.host.members.index(root), counts, flags)

        in_windows(windows_of(source, how), begin, complete)

    def _shares(self, flat: Tensor) -> list[Tensor]:
        """Split a tensor into one share per rank on this host; only leaders have nonempty shares."""
        leaders = self.hosts.leaders
        return split(flat, leaders) + [flat[:0]] * (self.host.size - leaders)

    def _reduce_scatter(
        self, source: Tensor, counts: Sequence[int], own: Tensor, reduction: int, flags: int
    ) -> None:
        """Reduce `source` over all ranks into `own`; rank r receives `counts[r]` elements of the result."""
        how = Accumulation.of(source.dtype, reduction, self.size)
        me = self.host.rank
        pieces = []  # this leader's share of each host's block
        for block in self.hosts.blocks(source, counts):
            shares = self._shares(block.to(how.dtype))
            piece = torch.empty_like(shares[me])
            self._local.reduce_scatter(piece, shares, how.reduction, flags)
            pieces.append(piece)
        if self.hosts.leads:
            combine = combine_in_core(self.host, how.dtype, how.reduction)
            self._run(ring_reduce_scatter(self.hosts.transport, pieces, combine))
        block = torch.empty(sum(counts[r] for r in self.host.members), dtype=source.dtype, device="cpu")
        parts, total = self._shares(block), pieces[self.hosts.index]
        if how.store:
            how.store(parts[me], total)
        elif total.numel():
            parts[me].copy_(total)
        self._local.all_gather(parts, parts[me], flags)
        before = sum(counts[r] for r in self.host.members[:me])
        own.copy_(block[before : before + own.numel()])

    def _all_gather(
        self, source: Tensor, counts: Sequence[int], targets: Sequence[Tensor], flags: int
    ) -> None:
        """Gather rank r's `source`, which has `counts[r]` elements, into `targets[r]` on all ranks."""
        whole = torch.empty(sum(counts), dtype=source.dtype, device="cpu")
        blocks = self.hosts.blocks(whole, counts)
        own_block = list(blocks[self.hosts.index].split([counts[r] for r in self.host.members]))
        self._local.all_gather(own_block, source, flags)
        shares = [self._shares(block) for block in blocks]
        if self.hosts.leads:
            self._run(ring_all_gather(self.hosts.transport, [each[self.host.rank] for each in shares]))
        for index, each in enumerate(shares):
            if index != self.hosts.index:
                self._local.all_gather(each, each[self.host.rank], flags)
        for members, block in zip(self.hosts.members, blocks, strict=True):
            for rank, part in zip(members, block.split([counts[r] for r in members]), strict=True):
                targets[rank].copy_(part)

    def _broadcast(self, flat: Tensor, root: int, flags: int) -> None:
        source = self.hosts.index_of(root)

        def begin(number: int, window: Tensor) -> tuple[list[Tensor], Running]:
            if self.hosts.index == source:
                self._local.broadcast(window, None, self.host.members.index(root), flags)
            shares = self._shares(window)
            own = shares[self.host.rank]
            steps: Steps = iter(())
            if own.numel():
                steps = tree.broadcast(Tagged(self.hosts.transport, number), own, source)
            return shares, Running(steps)

        def complete(shares: list[Tensor], link: Running) -> None:
            self._finish(link)
            if self.hosts.index != source:
                self._local.all_gather(shares, shares[self.host.rank], flags)

        length = max(1, WINDOW_BYTES // flat.element_size())
        in_windows(flat.split(length) if flat.numel() else (), begin, complete)


def _fingerprint(counts: Sequence[int]) -> int:
    """Return a nonzero hash of a list of counts; 0 means that there is no list."""
    return zlib.crc32(array("q", counts)) or 1


def _record_of(tensor: Tensor, counts: Sequence[int] | None) -> CallRecord:
    """Return the call record for a gather or a scatter."""
    if counts is None:
        return CallRecord(type=TYPES[tensor.dtype], count=tensor.numel())
    return CallRecord(type=TYPES[tensor.dtype], count=sum(counts), layout=_fingerprint(counts))
