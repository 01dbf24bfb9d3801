"""Execute the requests on which the ranks agreed: fuse all-reduces and call the collectives of the data group.

Tensor fusion combines all-reduces of equal type, operation, factors and device in one buffer in shared memory.  The
agreed list alone decides which tensors are fused, so the decision is the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import Communicator
from farandole.horovod.adasum import adasum
from farandole.horovod.errors import MismatchError
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
    Request,
)

_SMALLEST_BUFFER = 1 << 20


@dataclass
class Pack:
    """The tensors of one all-reduce: for each tensor its ready name and its index in the group."""

    dtype: torch.dtype
    members: list[tuple[Ready, int]] = field(default_factory=list)
    size: int = 0  # bytes

    @property
    def names(self) -> list[str]:
        """The names in the pack, without repetition."""
        return list(dict.fromkeys(ready.name for ready, _ in self.members))


def pack(ready: Iterable[Ready], threshold: int) -> list[Pack]:
    """Combine all-reduces of equal type, operation, factors and device into packs of at most `threshold` bytes.

    A larger tensor has its own pack.  Packs are in the order of their first members.
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
    """Memory for one pack at a time, shared by all ranks of the group if possible.

    It grows with the largest pack.  Packs are the same on all ranks, so all ranks grow the buffer together.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._memory: dict[torch.device, Tensor] = {}

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor of `size` bytes; its contents are undefined."""
        memory = self._memory.get(device)
        if memory is None or memory.numel() < size:
            room = _SMALLEST_BUFFER
            while room < size:
                room *= 2
            self._memory.pop(device, None)
            with torch.inference_mode(False):  # later packs are written in any mode
                memory = self._memory[device] = self._comm.empty(room, dtype=torch.uint8, device=device)
        return memory[:size].view(dtype)


def views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return consecutive parts of a flat tensor, in the shapes of other tensors."""
    parts: list[Tensor] = torch._C._nn.unflatten_dense_tensors(flat, like)
    return parts


_REDUCE_OPS = {
    SUM: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}


def rows_of(total: int, size: int) -> list[int]:
    """Return how many of `total` rows each of `size` ranks keeps; the first ranks keep one more if necessary."""
    share, more = divmod(total, size)
    return [share + (rank < more) for rank in range(size)]


class Executor:
    """Execute lists of ready names on one process set; the lists are the same on all members.

    ranks: the members' numbers in the world.  threshold: of fusion, in bytes.
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
        """Execute the names and call `finished` for each request of this rank, with an error or None.

        Disagreements are passed to `finished`.  Failures of a rank are raised.
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
                    self._carry_out(one, one.request)
                finished(one.request, None)

    def _carry_out(self, one: Ready, request: Request) -> None:
        """Execute one request of a kind that is not fused."""
        kind = one.signature.kind
        begin = time.monotonic()
        _await_inputs(request)
        if kind in self._kinds:  # a barrier or a join is done when all ranks have agreed on it
            self._kinds[kind](one, request)
        _await_outputs(request)
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
                _await_inputs(one.request)
                inputs.append(one.request.inputs[index])
                outputs.append(one.request.outputs[index])
        if any(tensor.numel() == 0 for tensor in inputs):
            keep = [index for index, tensor in enumerate(inputs) if tensor.numel()]
            inputs, outputs = [inputs[i] for i in keep], [outputs[i] for i in keep]
        if not inputs:
            return
        device = outputs[0].device
        # one contiguous tensor is reduced where it is; others are copied side by side
        alone = len(outputs) == 1 and outputs[0].is_contiguous()
        flat = outputs[0].view(-1) if alone else self._buffer.take(each.size, each.dtype, device)
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
        """All-reduce in place, and scale the result."""
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

    # ---- the others ----

    def _allgather(self, one: Ready, request: Request) -> None:
        outputs = []
        for index, tensor in enumerate(request.inputs):
            rows = [found.shapes[index][0] for found in one.signatures if found is not None]
            outputs.append(self._gather_rows(tensor, rows))
        request.outputs = outputs

    def _gather_rows(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """Concatenate tensors with different numbers of rows; shorter tensors are padded for the transfer."""
        most, rest = max(rows), tensor.shape[1:]
        everyone = tensor.new_empty((len(rows), most, *rest))
        if everyone.numel() == 0:
            return tensor.new_empty((sum(rows), *rest))
        mine = tensor.contiguous()
        if len(mine) < most:
            mine = torch.cat([mine, mine.new_zeros((most - len(mine), *rest))])
        dist.all_gather(list(everyone.unbind()), mine, group=self._group)
        if min(rows) == most:
            return everyone.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(everyone, rows, strict=True)])

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
        row = tensor[:1].numel() if len(tensor) else output[:1].numel()
        if row or not tensor.shape[1:]:
            # flat, so that a row of any shape is one piece
            width = max(1, row)
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
        rows = rows_of(len(tensor), self._size)
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
    """Return the shape of one tensor of a ready name."""
    return one.signature.shapes[index]


def _scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place; integers are multiplied in float64 and truncated, as in Horovod."""
    if factor == 1:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def _mode_of(requests: Iterable[Request | None]) -> AbstractContextManager[object]:
    """Return the mode for writing the tensors of requests: inference tensors can be written in inference mode only."""
    for request in requests:
        if request is not None and any(t.is_inference() for t in (*request.inputs, *request.outputs)):
            return torch.inference_mode()
    return nullcontext()


def _await_inputs(request: Request) -> None:
    """Wait until the device has computed the inputs."""
    if request.event is not None:
        request.event.synchronize()


def _await_outputs(request: Request) -> None:
    """Wait until the device has written the outputs: a finished request may be used on any stream."""
    if request.event is not None:
        torch.accelerator.synchronize()
