"""Execute the requests that all ranks have submitted: fuse all-reduces, and run collectives on the data group.

Tensor fusion copies the tensors of all-reduces with the same dtype, operation, scale factors and device into one
buffer.  The agreed request list determines which tensors are fused, so all ranks fuse the same tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import Communicator
from farandole.horovod.monitoring import Timeline
from farandole.horovod.negotiation import Ready
from farandole.horovod.requests import (
    ADASUM,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    AVERAGE,
    BROADCAST,
    MAX,
    MIN,
    PRODUCT,
    REDUCESCATTER,
    SUM,
    MismatchError,
    Request,
)

_SMALLEST_BUFFER = 1 << 20


@dataclass
class Pack:
    """The tensors that are reduced in one all-reduce.

    Each member is a request and the index of one of its tensors.
    """

    dtype: torch.dtype
    members: list[tuple[Ready, int]] = field(default_factory=list)
    size: int = 0  # bytes

    @property
    def names(self) -> list[str]:
        """Return the distinct request names in the pack."""
        return list(dict.fromkeys(ready.name for ready, _ in self.members))


def pack(ready: Iterable[Ready], threshold: int) -> list[Pack]:
    """Combine compatible all-reduces into packs of at most `threshold` bytes.

    All-reduces are compatible if their dtypes, operations, scale factors and devices are equal.  A tensor of more than
    `threshold` bytes gets a pack to itself.  The packs are in the order
    in which their first members appear in `ready`.
    """
    packs: list[Pack] = []
    open_packs: dict[tuple[object, ...], Pack] = {}
    for one in ready:
        agreed = one.signature
        for index, (dtype, shape) in enumerate(zip(agreed.dtypes, agreed.shapes, strict=True)):
            size = dtype.itemsize
            for length in shape:
                size *= length
            kind = (dtype, agreed.op, agreed.prescale, agreed.postscale, agreed.device)
            current = open_packs.get(kind)
            if current is None or current.size + size > threshold:
                current = open_packs[kind] = Pack(dtype)
                packs.append(current)
            current.members.append((one, index))
            current.size += size
    return packs


class FusionBuffer:
    """A buffer for one pack at a time, in memory shared with the other ranks if possible.

    The buffer grows to fit the largest pack.  Packs are the same on all ranks, so all ranks grow the buffer at
    the same time.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._memory: dict[torch.device, Tensor] = {}

    def acquire(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized flat tensor of `size` bytes; the next call for the same device reuses the memory."""
        memory = self._memory.get(device)
        if memory is None or memory.numel() < size:
            capacity = _SMALLEST_BUFFER
            while capacity < size:
                capacity *= 2
            self._memory.pop(device, None)
            # a normal tensor can be written inside and outside inference mode
            with torch.inference_mode(False):
                memory = self._memory[device] = self._comm.empty(capacity, dtype=torch.uint8, device=device)
        return memory[:size].view(dtype)


def views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return consecutive views into a flat tensor, shaped like the tensors in `like`."""
    parts: list[Tensor] = torch._C._nn.unflatten_dense_tensors(flat, like)
    return parts


_REDUCE_OPS = {
    SUM: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}


def split_evenly(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` integers that differ by at most one, in descending order."""
    share, more = divmod(total, parts)
    return [share + (index < more) for index in range(parts)]


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Return the Adasum of two tensors with equal shapes and dtypes.  The coefficients are computed in float64."""
    one, other = a.reshape(-1).double(), b.reshape(-1).double()
    dot, a_square, b_square = one @ other, one @ one, other @ other
    a_weight = torch.where(a_square > 0, 1 - dot / (2 * a_square), 1.0)
    b_weight = torch.where(b_square > 0, 1 - dot / (2 * b_square), 1.0)
    return (a_weight * one + b_weight * other).view(a.shape).to(a.dtype)


def adasum(flat: Tensor, parts: Callable[[Tensor], Sequence[Tensor]], group: dist.ProcessGroup) -> None:
    """Combine each part of `flat` across the group with Adasum, in place.

    Adasum (Maleki et al., 2020, "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924) combines two
    gradients a and b into

        (1 - a.b / 2|a|^2) a  +  (1 - a.b / 2|b|^2) b

    The result is the sum for orthogonal gradients and the mean for equal gradients.  Ranks are combined in pairs, then
    in pairs of pairs, so the number of ranks must be a power of two.  In round k, a rank exchanges its vector with the
    rank whose number differs in bit k.  Both ranks combine the two vectors in the same order, so all results are bitwise
    equal.

    Args:
        flat: A flat tensor with the same size on all ranks.
        parts: A function that splits a tensor shaped like `flat` into parts.  Each part has its own coefficients (the
            per-layer variant in the paper).
        group: The process group.
    """
    rank, size = group.rank(), group.size()
    theirs = torch.empty_like(flat)
    distance = 1
    while distance < size:
        peer = rank ^ distance
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, flat.clone(), group=group, group_peer=peer),
                dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()
        low, high = (flat, theirs) if rank < peer else (theirs, flat)
        for part, a, b in zip(parts(flat), parts(low), parts(high), strict=True):
            part.copy_(combine(a, b))
        distance *= 2


def unsuitable_for_adasum(size: int) -> str | None:
    """Return an error message if Adasum cannot combine `size` ranks, otherwise None."""
    if size & (size - 1):
        return f"Running Adasum with {size} ranks is not possible: the number of ranks must be a power of 2"
    return None


class Executor:
    """Executes lists of ready requests on one process set.  The lists must be the same on all members.

    Args:
        group: The process set's data group.
        ranks: The members' ranks in the world.
        threshold: The fusion threshold in bytes.
        timeline: The timeline.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], threshold: int, timeline: Timeline
    ) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._ranks = ranks
        self._threshold = threshold
        self._timeline = timeline
        self._buffer = FusionBuffer(Communicator(group))
        self._kinds: dict[str, Callable[[Ready, Request], None]] = {
            ALLGATHER: self._allgather,
            BROADCAST: self._broadcast,
            ALLTOALL: self._alltoall,
            REDUCESCATTER: self._reducescatter,
        }

    def run(self, ready: Sequence[Ready], finished: Callable[[Request, BaseException | None], None]) -> None:
        """Execute the ready requests, and call `finished(request, error)` for each request of this rank.

        `error` is None for a successful request, and a `MismatchError` for a request that differs between ranks.  If a
        rank fails, the process group's exception propagates.
        """
        if self._timeline.active:
            now = time.monotonic()
            for one in ready:
                if one.request is not None:
                    activity = f"NEGOTIATE_{one.signature.kind.upper()}"
                    self._timeline.span(one.name, activity, one.request.submitted, now)
        reductions = [one for one in ready if one.error is None and one.signature.kind == ALLREDUCE]
        for one in ready:
            if one.error is not None and one.request is not None:
                finished(one.request, MismatchError(one.error))
        left = {id(one): len(one.signature.shapes) for one in reductions}
        for each in pack(reductions, self._threshold):
            with _mode_of(one.request for one, _ in each.members):
                self._allreduce(each)
            for one, _ in each.members:
                left[id(one)] -= 1
                if not left[id(one)] and one.request is not None:
                    finished(one.request, None)
        for one in ready:
            if one.error is None and one.request is not None and one.signature.kind != ALLREDUCE:
                with _mode_of([one.request]):
                    self._execute(one, one.request)
                finished(one.request, None)

    def _execute(self, one: Ready, request: Request) -> None:
        """Execute one request that is not fused."""
        kind = one.signature.kind
        begin = time.monotonic()
        _wait_for_inputs(request)
        # barriers and joins need no collective, because the negotiation has synchronized the ranks
        if kind in self._kinds:
            self._kinds[kind](one, request)
        _wait_for_outputs(request)
        self._timeline.span(one.name, kind.upper(), begin, time.monotonic())
        self._timeline.flush()

    # ---- all-reduce ----

    def _allreduce(self, each: Pack) -> None:
        begin = time.monotonic()
        agreed = each.members[0][0].signature
        inputs, outputs = [], []
        for one, index in each.members:
            if one.request is None:  # this rank has joined
                inputs.append(torch.zeros(agreed_shape(one, index), dtype=each.dtype))
                outputs.append(inputs[-1])
            else:
                _wait_for_inputs(one.request)
                inputs.append(one.request.inputs[index])
                outputs.append(one.request.outputs[index])
        if any(tensor.numel() == 0 for tensor in inputs):
            keep = [index for index, tensor in enumerate(inputs) if tensor.numel()]
            inputs, outputs = [inputs[i] for i in keep], [outputs[i] for i in keep]
        if not inputs:
            return
        device = outputs[0].device
        # a single contiguous tensor is reduced in place; other tensors are copied into the fusion buffer
        alone = len(outputs) == 1 and outputs[0].is_contiguous()
        flat = outputs[0].view(-1) if alone else self._buffer.acquire(each.size, each.dtype, device)
        parts = [outputs[0]] if alone else views(flat, outputs)
        if not (alone and inputs[0] is outputs[0]):
            torch._foreach_copy_(parts, inputs)
        copied = time.monotonic()
        _scale(flat, agreed.prescale)
        if agreed.op == ADASUM:
            like = outputs
            adasum(flat, lambda vector: views(vector, like), self._group)
            _scale(flat, agreed.postscale)
        else:
            self._reduce(flat, agreed.op, agreed.postscale)
        reduced = time.monotonic()
        if not alone:
            torch._foreach_copy_(outputs, parts)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        if self._timeline.active:
            self._record(each, begin, copied, reduced, fused=not alone)

    def _reduce(self, flat: Tensor, op: int, postscale: float) -> None:
        """All-reduce `flat` in place, and scale the result."""
        if op == AVERAGE and flat.is_floating_point():
            dist.all_reduce(flat, dist.ReduceOp.AVG, group=self._group)
        elif op == AVERAGE:
            dist.all_reduce(flat, dist.ReduceOp.SUM, group=self._group)
            postscale /= self._size
        else:
            dist.all_reduce(flat, _REDUCE_OPS[op], group=self._group)
        _scale(flat, postscale)

    def _record(self, each: Pack, begin: float, copied: float, reduced: float, fused: bool) -> None:
        end = time.monotonic()
        arguments: dict[str, Any] = {"bytes": each.size, "tensors": len(each.members)}
        collective = f"{dist.get_backend(self._group).upper()}_ALLREDUCE"
        for name in each.names:
            self._timeline.span(name, "ALLREDUCE", begin, end, arguments)
            if fused:
                self._timeline.span(name, "MEMCPY_IN_FUSION_BUFFER", begin, copied)
            self._timeline.span(name, collective, copied, reduced)
            if fused:
                self._timeline.span(name, "MEMCPY_OUT_FUSION_BUFFER", reduced, end)
        self._timeline.flush()

    # ---- other collectives ----

    def _allgather(self, one: Ready, request: Request) -> None:
        outputs = []
        for index, tensor in enumerate(request.inputs):
            rows = [found.shapes[index][0] for found in one.signatures if found is not None]
            outputs.append(self._gather_rows(tensor, rows))
        request.outputs = outputs

    def _gather_rows(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the concatenated tensors of all ranks; the tensor on rank r has `rows[r]` rows."""
        most, rest = max(rows), tensor.shape[1:]
        gathered = tensor.new_empty((len(rows), most, *rest))
        if gathered.numel() == 0:
            return tensor.new_empty((sum(rows), *rest))
        own = tensor.contiguous()
        if len(own) < most:
            own = torch.cat([own, own.new_zeros((most - len(own), *rest))])
        dist.all_gather(list(gathered.unbind()), own, group=self._group)
        if min(rows) == most:
            return gathered.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])

    def _broadcast(self, one: Ready, request: Request) -> None:
        root = self._ranks.index(one.signature.root)
        for tensor, output in zip(request.inputs, request.outputs, strict=True):
            whole = output if output.is_contiguous() else output.contiguous()
            if self._rank == root and tensor is not whole:
                whole.copy_(tensor)
            if whole.numel():
                dist.broadcast(whole, group=self._group, group_src=root)
            if whole is not output:
                output.copy_(whole)

    def _alltoall(self, one: Ready, request: Request) -> None:
        (tensor,) = request.inputs
        sent = list(request.signature.splits)
        received = [found.splits[self._rank] for found in one.signatures if found is not None]
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        # flatten, so that a row of any shape is a block of `width` elements; the width is the same on all ranks
        width = math.prod(tensor.shape[1:])
        if width:
            dist.all_to_all_single(
                output.view(-1),
                tensor[: sum(sent)].contiguous().view(-1),
                [count * width for count in received],
                [count * width for count in sent],
                group=self._group,
            )
        request.outputs, request.received_splits = [output], received

    def _reducescatter(self, one: Ready, request: Request) -> None:
        outputs = []
        for tensor in request.inputs:
            outputs.append(self._reduce_rows(tensor, one))
        request.outputs = outputs

    def _reduce_rows(self, tensor: Tensor, one: Ready) -> Tensor:
        agreed = one.signature
        rows = split_evenly(len(tensor), self._size)
        most, rest = max(rows), tensor.shape[1:]
        output = tensor.new_empty((most, *rest))
        if output.numel() == 0:
            return output[: rows[self._rank]]
        source = tensor.contiguous()
        if agreed.prescale != 1:
            source = source.clone()
            _scale(source, agreed.prescale)
        parts = list(source.split(rows))
        if min(rows) < most:
            parts = [torch.cat([part, part.new_zeros((most - len(part), *rest))]) for part in parts]
        averages = agreed.op == AVERAGE and tensor.is_floating_point()
        op = dist.ReduceOp.AVG if averages else _REDUCE_OPS[SUM if agreed.op == AVERAGE else agreed.op]
        dist.reduce_scatter(output, parts, op, group=self._group)
        _scale(output, agreed.postscale / (self._size if agreed.op == AVERAGE and not averages else 1))
        return output[: rows[self._rank]]


def agreed_shape(one: Ready, index: int) -> tuple[int, ...]:
    """Return the agreed shape of the tensor at `index` in a request."""
    return one.signature.shapes[index]


def _scale(tensor: Tensor, factor: float) -> None:
    """Scale `tensor` in place.  Integers are multiplied in float64 and truncated, as in Horovod."""
    if factor == 1:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def _mode_of(requests: Iterable[Request | None]) -> AbstractContextManager[object]:
    """Return a context manager that enables inference mode if any request has inference tensors."""
    # inference tensors are writable only in inference mode
    for request in requests:
        if request is not None and any(t.is_inference() for t in (*request.inputs, *request.outputs)):
            return torch.inference_mode()
    return nullcontext()


def _wait_for_inputs(request: Request) -> None:
    if request.event is not None:
        request.event.synchronize()


def _wait_for_outputs(request: Request) -> None:
    if request.event is not None:  # the program may use the outputs on any stream
        torch.accelerator.synchronize()
