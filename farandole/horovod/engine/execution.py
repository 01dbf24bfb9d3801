"""Carrying out what the ranks have agreed on: each ready name becomes a part of a collective on the data group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import Communicator
from farandole.horovod.common.exceptions import MismatchError
from farandole.horovod.engine.adasum import adasum
from farandole.horovod.engine.fusion import FusionBuffer, Pack, pack, views
from farandole.horovod.engine.negotiation import Ready
from farandole.horovod.engine.requests import (
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
from farandole.horovod.engine.timeline import Timeline

_REDUCE_OPS = {
    SUM: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}


def rows_of(total: int, size: int) -> list[int]:
    """How a reduce-scatter divides `total` rows among `size` ranks: the first ranks get one more if need be."""
    share, more = divmod(total, size)
    return [share + (rank < more) for rank in range(size)]


class Executor:
    """Executes lists of ready names on one process set; every member is given equal lists.

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
        """Execute them and call `finished` for each request of this rank, with the error if there is one.

        What it raises is no disagreement but a failure: of a rank, or of this one.
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
        """One request of a kind that is not fused."""
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
        """Concatenate tensors that differ in their numbers of rows; shorter ones travel padded."""
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
    """The shape of one tensor of a ready name."""
    return one.signature.shapes[index]


def _scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place; whole numbers are computed in float64 and cut off, as Horovod does."""
    if factor == 1:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def _mode_of(requests: Iterable[Request | None]) -> AbstractContextManager[object]:
    """The mode in which the tensors of requests are written: torch lets no other write those of inference mode."""
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
