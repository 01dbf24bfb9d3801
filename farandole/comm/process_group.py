"""The `torch.distributed` backend named `farandole`: a process group in Python over the C core.

CPU tensors of ranks that share a host go through shared memory.  All else goes to an inner process group of
torch's own, made when it is first needed: CUDA tensors to NCCL, sparse tensors and groups that span hosts
to Gloo.

The methods have the names and arguments that torch calls, from Python and (through pybind11) from C++:
DDP's reducer, functional collectives, autograd.  torch 2.13 renamed some of them; both spellings are here.
"""

# mypy: disable-error-code="override,assignment,attr-defined"
# torch's stubs have an overload per spelling where one method here takes all, and lack AllgatherOptions

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from farandole.comm.arguments import in_turn, options, reduction_number, same_count, tensor_list, tensor_lists
from farandole.comm.compression.base import Compressor
from farandole.comm.dtypes import REDUCTION_NAMES, REDUCTIONS, TYPES, reducible
from farandole.comm.group_base import GroupBase
from farandole.comm.messages import ANY_RANK
from farandole.comm.remark import say_once
from farandole.comm.spanning import SpanningCollectives
from farandole.comm.work import COMPLETED, flags_here

# for each type and reduction that go together: the core's numbers of both
_PLANS = {
    (dtype, operation): (TYPES[dtype], number)
    for dtype in TYPES
    for operation, number in REDUCTIONS.items()
    if reducible(dtype, number)
}
_NO_TIMEOUT = timedelta(0)


class FarandoleProcessGroup(GroupBase):
    """A process group of the `farandole` backend.  Made by `torch.distributed`, not by hand."""

    # ---- reductions ----

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Reduce each tensor over all ranks, in place."""
        if timeout is None and self._all_reduce_now(tensors, opts):
            return COMPLETED
        tensors, opts = tensor_list(tensors), options(opts, dist.AllreduceOptions, reduceOp=opts)
        carrier = self._carrier_of(*tensors)
        if carrier is None:
            return self._inner().allreduce(tensors, opts)
        reduction = reduction_number(opts.reduceOp, tensors[0].dtype)
        return self._issue(carrier.all_reduce(tensors, reduction), tensors, opts, timeout)

    def _all_reduce_now(self, tensors: Any, opts: Any) -> bool:
        """The common all-reduce, with as little as possible between the caller and the core.

        A small one takes less time than the checks of the general way.  False where it does not apply: the
        caller does not wait, calls are under way, or the tensor is not an ordinary dense one.
        """
        host = self._alone_on_host
        if host is None or type(tensors) is not list or len(tensors) != 1 or getattr(opts, "asyncOp", True):
            return False
        tensor, handle = tensors[0], host.handle
        plan = _PLANS.get((tensor.dtype, hash(opts.reduceOp)))
        if plan is None or not tensor.is_cpu or tensor.layout is not torch.strided or handle is None:
            return False
        address = tensor.data_ptr()  # 0 for a wrapper of another tensor
        if not address or not tensor.is_contiguous() or tensor.is_neg() or opts.timeout > _NO_TIMEOUT:
            return False
        if not self._lane.enter():
            return False
        kind, reduction = plan
        try:
            status = self._core_all_reduce(handle, address, tensor.numel(), kind, reduction, flags_here())
            if status:  # while the lane is held: after that another thread may destroy the group
                host.check(status)
        finally:
            self._lane.leave()
        return True

    def allreduce_compressed(
        self, tensor: Tensor, op: str, compressor: Compressor, async_op: bool
    ) -> dist.Work:
        """Sum or average a tensor over all ranks, in place, compressed where it crosses hosts."""
        self.check_compressible(tensor)
        carrier, reduction = self._carrier_of(tensor), REDUCTION_NAMES.index(op)
        assert carrier is not None  # it was checked
        if isinstance(carrier, SpanningCollectives):
            call = carrier.all_reduce_compressed(tensor, reduction, compressor)
        else:
            if self._rank == 0:
                say_once("nothing is compressed: all ranks are on this host, and share its memory")
            call = carrier.all_reduce([tensor], reduction)
        return self._lane.submit(call, [tensor]) if async_op else self._lane.run(call, [tensor])

    def check_compressible(self, tensor: Tensor) -> None:
        """ValueError unless tensors like this one can be compressed here."""
        if self._host is None:
            raise ValueError("there is no compression without the C core; reduce without it")
        if self._carrier_of(tensor) is None:
            raise ValueError(
                f"there is no compression of {tensor.layout} tensors on {tensor.device}, only of dense ones on "
                f"the CPU; reduce without it"
            )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce a list of tensors over all ranks, in place."""
        tensors, opts = tensor_list(tensors), options(opts, dist.AllreduceCoalescedOptions)
        carrier = self._carrier_of(*tensors)
        if carrier is None:
            return self._inner().allreduce_coalesced(tensors, opts)
        calls = [
            carrier.all_reduce([tensor], reduction_number(opts.reduceOp, tensor.dtype)) for tensor in tensors
        ]
        return self._issue(in_turn(calls), tensors, opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce over all ranks into the tensor of the root."""
        tensors, opts = tensor_list(tensors), options(opts, dist.ReduceOptions, reduceOp=op, rootRank=opts)
        carrier = self._carrier_of(*tensors)
        if carrier is None:
            return self._inner().reduce(tensors, opts)
        reduction = reduction_number(opts.reduceOp, tensors[0].dtype)
        return self._issue(carrier.reduce(tensors[0], opts.rootRank, reduction), tensors, opts, timeout)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce lists of tensors (one per rank, lengths may differ) and keep this rank's."""
        outputs, inputs = tensor_list(outputs), tensor_lists(inputs)
        opts = options(opts, dist.ReduceScatterOptions, reduceOp=opts)
        carrier = self._carrier_of(*outputs, *(part for parts in inputs for part in parts))
        if carrier is None:
            return self._inner().reduce_scatter(outputs, inputs, opts)
        calls = []
        for output, parts in zip(outputs, inputs, strict=True):
            same_count("reduce_scatter", "the input list", len(parts), "the group", self._size)
            reduction = reduction_number(opts.reduceOp, output.dtype)
            calls.append(carrier.reduce_scatter(output, parts, reduction))
        return self._issue(in_turn(calls), outputs, opts, timeout)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce one tensor of equal parts and keep this rank's part."""
        opts = options(opts, dist.ReduceScatterOptions, reduceOp=opts)
        return self.reduce_scatter_single_coalesced([output], [input], opts, timeout)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """`reduce_scatter_single` for each pair."""
        outputs, inputs = tensor_list(outputs), tensor_list(inputs)
        opts = options(opts, dist.ReduceScatterOptions)
        carrier = self._carrier_of(*outputs, *inputs)
        if carrier is None:
            return self._inner().reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        calls = []
        for output, tensor in zip(outputs, inputs, strict=True):
            all_outputs = output.numel() * self._size
            same_count("reduce_scatter", "the input", tensor.numel(), "outputs of all", all_outputs)
            reduction = reduction_number(opts.reduceOp, tensor.dtype)
            calls.append(carrier.reduce_scatter_even(output, tensor, reduction))
        return self._issue(in_turn(calls), outputs, opts, timeout)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- moving data ----

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Copy the root's tensor to all ranks."""
        tensors, opts = tensor_list(tensors), options(opts, dist.BroadcastOptions, rootRank=opts)
        carrier = self._carrier_of(*tensors)
        if carrier is None:
            return self._inner().broadcast(tensors, opts)
        return self._issue(carrier.broadcast(tensors[0], opts.rootRank), tensors, opts, timeout)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Collect every rank's tensor (lengths may differ) in a list on every rank."""
        outputs, inputs = tensor_lists(outputs), tensor_list(inputs)
        opts = options(opts, AllgatherOptions)
        carrier = self._carrier_of(*inputs, *(part for parts in outputs for part in parts))
        if carrier is None:
            return self._inner().allgather(outputs, inputs, opts)
        calls = []
        for parts, tensor in zip(outputs, inputs, strict=True):
            same_count("all_gather", "the output list", len(parts), "the group", self._size)
            own = parts[self._rank].numel()
            same_count("all_gather", "the input", tensor.numel(), "this rank's output", own)
            calls.append(carrier.all_gather(parts, tensor))
        return self._issue(in_turn(calls), [part for parts in outputs for part in parts], opts, timeout)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """`allgather` for each input; here `outputs[r]` are all the tensors of rank r."""
        same_count("all_gather_coalesced", "the output list", len(outputs), "the group", self._size)
        if self._host is None:
            return self._inner().allgather_coalesced(outputs, inputs, opts)
        by_tensor = [list(parts) for parts in zip(*outputs, strict=True)]
        return self.allgather(by_tensor, inputs, opts)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Concatenate every rank's tensor."""
        return self.all_gather_single_coalesced([output], [input], opts, timeout)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """`all_gather_single` for each pair."""
        outputs, inputs = tensor_list(outputs), tensor_list(inputs)
        opts = options(opts, AllgatherOptions)
        carrier = self._carrier_of(*outputs, *inputs)
        if carrier is None:
            return self._inner().allgather_into_tensor_coalesced(outputs, inputs, opts)
        calls = []
        for output, tensor in zip(outputs, inputs, strict=True):
            all_inputs = tensor.numel() * self._size
            same_count("all_gather", "the output", output.numel(), "inputs of all", all_inputs)
            calls.append(carrier.all_gather_even(output, tensor))
        return self._issue(in_turn(calls), outputs, opts, timeout)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Collect every rank's tensor in a list on the root."""
        outputs, inputs = tensor_lists(outputs), tensor_list(inputs)
        opts = options(opts, dist.GatherOptions, rootRank=opts)
        parts = outputs[0] if outputs else []
        carrier = self._carrier_of(*inputs, *parts)
        if carrier is None:
            return self._inner().gather(outputs, inputs, opts)
        if self._rank == opts.rootRank:
            same_count("gather", "the output list", len(parts), "the group", self._size)
        return self._issue(carrier.gather(parts, inputs[0], opts.rootRank), parts, opts, timeout)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Give every rank its tensor of the root's list."""
        outputs, inputs = tensor_list(outputs), tensor_lists(inputs)
        opts = options(opts, dist.ScatterOptions, rootRank=opts)
        parts = inputs[0] if inputs else []
        carrier = self._carrier_of(*outputs, *parts)
        if carrier is None:
            return self._inner().scatter(outputs, inputs, opts)
        if self._rank == opts.rootRank:
            same_count("scatter", "the input list", len(parts), "the group", self._size)
        return self._issue(carrier.scatter(outputs[0], parts, opts.rootRank), outputs, opts, timeout)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Send input j to rank j and receive output i from rank i; lengths may differ."""
        outputs, inputs = tensor_list(outputs), tensor_list(inputs)
        opts = options(opts, dist.AllToAllOptions)
        carrier = self._carrier_of(*outputs, *inputs)
        if carrier is None:
            return self._inner().alltoall(outputs, inputs, opts)
        same_count("all_to_all", "the input list", len(inputs), "the group", self._size)
        same_count("all_to_all", "the output list", len(outputs), "the group", self._size)
        return self._issue(carrier.all_to_all(outputs, inputs), outputs, opts, timeout)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """The same with parts of one tensor, split along dimension 0 (evenly where no splits are given)."""
        (output,), (input,) = tensor_list(output), tensor_list(input)
        opts = options(opts, dist.AllToAllOptions)
        carrier = self._carrier_of(output, input)
        if carrier is None:
            return self._inner().alltoall_base(output, input, output_splits, input_splits, opts)
        call = carrier.all_to_all_single(output, input, list(output_splits), list(input_splits))
        return self._issue(call, [output], opts, timeout)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Wait until every rank is here."""
        opts = options(opts, dist.BarrierOptions)
        carrier = self._carrier_of()
        if carrier is None:
            return self._inner().barrier(opts)
        return self._issue(carrier.barrier(), [], opts, timeout)

    # ---- point to point ----

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Send a tensor to a rank of the group; returns at once."""
        return self._message(tensors, peer, tag, sends=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from a rank of the group; returns at once."""
        return self._message(tensors, peer, tag, sends=False)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Receive a tensor from any rank of the group; returns at once."""
        return self._message(tensors, ANY_RANK, tag, sends=False)

    def _message(self, tensors: list[Tensor], peer: int, tag: int, *, sends: bool) -> dist.Work:
        (tensor,) = tensor_list(tensors)
        carrier = self._carrier_of(tensor)
        if carrier is None:
            inner = self._inner()
            if sends:
                return inner.send([tensor], peer, tag)
            return inner.recv([tensor], peer, tag) if peer >= 0 else inner.recv_anysource([tensor], tag)
        if peer == self._rank:
            raise ValueError(f"rank {peer} cannot exchange messages with itself")
        assert self._host is not None
        return self._messages.post(self._host, tensor, peer, tag, sends=sends)
