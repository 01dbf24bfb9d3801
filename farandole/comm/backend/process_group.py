"""The `torch.distributed` process group class of the backends `farandole` and `farandole-mpi`.

torch calls the methods from Python and, through pybind11, from C++ (DDP's reducer, functional collectives, autograd).
The methods therefore have torch's names and arguments.  Methods that torch 2.13 renamed are available under both names.

If the backend does not support a tensor, an inner torch process group runs the call: NCCL for CUDA tensors, and Gloo
for sparse tensors.  The inner group is created on first use.  NCCL does not support several ranks on one device.  If
ranks share a device, CUDA tensors are copied to the host instead.
"""

# mypy: disable-error-code="override,assignment,attr-defined"
# torch's stubs declare one overload per call form, but these methods accept all forms; the stubs lack AllgatherOptions

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from farandole import native
from farandole.comm import operations as table
from farandole.comm.algorithms.steps import Combine
from farandole.comm.backend.arguments import (
    one_list,
    one_tensor,
    options_of,
    tensor_list,
    tensors_of,
    torch_keywords,
)
from farandole.comm.backend.default_backend import register_default_backend
from farandole.comm.backend.lazy_backend import LazyBackend
from farandole.comm.communicator import Communicator
from farandole.comm.core import Core, GroupCore
from farandole.comm.dense import copy_back, separate_tensors
from farandole.comm.describe import SPARSE_LAYOUT
from farandole.comm.dispatcher import Dispatcher
from farandole.comm.dtypes import REDUCTION_NAMES, TYPES
from farandole.comm.dynamo import exclude_from_dynamo
from farandole.comm.errors import RankLate
from farandole.comm.fallback import TorchCore, has_nccl, torch_device_group, torch_group
from farandole.comm.hierarchical.core import HierarchicalCore
from farandole.comm.hierarchical.windows import combine_in_core
from farandole.comm.operations import Operation, existing_rank, reduction_number, same_count
from farandole.comm.transport import WireTransport
from farandole.comm.work import Call, seconds_of
from farandole.native import Call as CallRecord

_NO_TIMEOUT = timedelta(0)
Pair = tuple[Sequence[Tensor], Sequence[Tensor]]
"""The outputs and the inputs of one call of a `Core`."""


@exclude_from_dynamo
class FarandoleProcessGroup(dist.ProcessGroup):
    """A process group of the backend `farandole` or `farandole-mpi`.

    As in `torch.distributed.ProcessGroup`, collectives, sends and receives return a `Work`.  The operation is complete
    when `Work.wait` returns.

    Args:
        store: The store through which inner torch groups connect.
        rank: The rank of this process in the group.
        size: The number of ranks.
        timeout: How long a call may wait for other ranks.
        name: The name of the group.
        core: The implementation of the collectives, or None if the C core is missing and Gloo runs every call.
        address: The address on which inner torch groups listen, or None for torch's default.
        backend: The backend's name in torch.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        core: GroupCore | None,
        address: str | None,
        backend: str = "farandole",
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks this constructor
        self._rank, self._size = rank, size
        self._store, self._timeout, self._address = store, timeout, address
        self._backend, self._group_name, self._group_desc = backend, name, "undefined"
        make = partial(torch_group, store, rank, size, timeout, name, address)
        self._fallback = TorchCore(make, rank, size, backend, cpu_only=True)
        make_for_devices = partial(torch_device_group, store, rank, size, timeout, name)
        self._device_fallback = TorchCore(make_for_devices, rank, size, backend)
        chosen: Core = core or self._fallback
        self.communicator = Communicator.over(Dispatcher(chosen, name, self._fallback, self._device_fallback))
        self._dispatcher = self.communicator.dispatcher
        self._direct, self._direct_async = self._dispatcher.direct, self._dispatcher.direct_async
        self._host = core.host if core is not None else None
        self._default_backend = register_default_backend(self, rank, size, backend)

    # ---- properties read by torch ----

    def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
        """Return the name of the backend."""
        return self._backend

    def name(self) -> str:
        """Return the name of the backend."""
        return self._backend

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name by which functional collectives find the group."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name by which functional collectives find the group."""
        return self._group_name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the description of the group."""
        self._group_desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description of the group."""
        return self._group_desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:
        """The name by which functional collectives find the group."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """The description of the group."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = torch.cuda.is_available() if self._backend != "farandole" else has_nccl()
        return [torch.device("cpu"), *([torch.device("cuda")] if cuda else [])]

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        if device.type == "cpu" and self._host is not None:
            return LazyBackend(self)
        if device.type != "cuda":
            return self._fallback.group._get_backend(device)
        core = self._dispatcher.core
        if isinstance(core, GroupCore) and core.takes_devices:
            return LazyBackend(self)
        return self._device_fallback.group._get_backend(device)

    get_backend = _get_backend

    def _inner(self, tensors: Sequence[Tensor] = ()) -> dist.ProcessGroup:
        """Return the torch process group that runs calls with `tensors`."""
        # the first access creates the group, which is a collective call for CPU tensors
        return self._dispatcher.fallback_for(tensors).group

    # ---- shutdown ----

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may wait for other ranks."""
        self._timeout = timeout
        self._dispatcher.core.set_timeout(timeout)
        self._fallback.set_timeout(timeout)
        self._device_fallback.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group, and notify the ranks that wait for this rank."""
        self._dispatcher.close()

    def abort(self) -> None:
        """Leave the group immediately; all pending calls of this process fail."""
        self._dispatcher.abort()

    def abandon(self, note: str, patience_s: float) -> None:
        """Leave the group at program exit: notify the other ranks, and stop the group's threads.

        Args:
            note: The reason shown in the errors of waiting ranks.
            patience_s: How long this call may wait for pending operations, in seconds.
        """
        self._dispatcher.abandon(note, patience_s)

    # ---- for benchmarks ----

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of the group, as one list per host."""
        core = self._dispatcher.core
        return core.hosts.members if isinstance(core, HierarchicalCore) else [list(range(self._size))]

    def between(self, ranks: Sequence[int], channel: int) -> WireTransport:
        """Return a transport among `ranks` that sends messages with the C core.

        Args:
            ranks: The ranks that use the transport, including this rank.
            channel: A number that distinguishes the messages from other messages between these ranks.  Channels 1 and 2
                are reserved for collectives.

        Raises:
            RuntimeError: if the C core is missing.
        """
        return WireTransport(self._native_host(), ranks, channel)

    def combine(self, dtype: torch.dtype, reduction: str) -> Combine:
        """Return a function that reduces two tensors with the C core.

        Raises:
            RuntimeError: if the C core is missing.
        """
        return combine_in_core(self._native_host(), dtype, REDUCTION_NAMES.index(reduction))

    def _native_host(self) -> Any:
        if self._host is None:
            raise RuntimeError(
                f"group {self._group_name!r}: this operation needs the C core, but the group communicates through "
                "Gloo; see `farandole info` for the reason"
            )
        return self._host

    def allocate_shared(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor for this rank, in memory that the ranks of this host share.

        This is a collective call; see `Communicator.empty`.
        """
        return self._dispatcher.allocate(shape, dtype)

    # ---- reductions ----

    @torch_keywords
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Reduce a tensor over all ranks in place."""
        path = self._path(opts, timeout)
        if path and type(tensors) is list and len(tensors) == 1:
            work: dist.Work | None = path.all_reduce(tensors[0], hash(opts.reduceOp))
            if work is not None:
                return work
        tensors, opts = (
            one_tensor("all_reduce", tensors),
            options_of(opts, dist.AllreduceOptions, reduceOp=opts),
        )
        work = self._issue(table.ALL_REDUCE, [(tensors, tensors)], opts, timeout)
        return work or self._inner(tensors).allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce each of `tensors` over all ranks in place."""
        tensors, opts = (
            tensors_of("all_reduce_coalesced", tensors),
            options_of(opts, dist.AllreduceCoalescedOptions),
        )
        separate = separate_tensors(tensors)
        work = self._issue(
            table.ALL_REDUCE, [([t], [t]) for t in separate], opts, written=tensors, copies=separate
        )
        return work or self._inner(tensors).allreduce_coalesced(tensors, opts)

    @torch_keywords
    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce a tensor over all ranks into the tensor on the root."""
        path = self._path(opts, timeout)
        if path and type(tensors) is list and len(tensors) == 1:
            work: dist.Work | None = path.reduce(tensors[0], hash(opts.reduceOp), opts.rootRank)
            if work is not None:
                return work
        tensors = one_tensor("reduce", tensors)
        opts = options_of(opts, dist.ReduceOptions, reduceOp=op, rootRank=opts)
        existing_rank("reduce", "the root", opts.rootRank, self._size)
        work = self._issue(table.REDUCE, [(tensors, tensors)], opts, timeout, opts.rootRank)
        return work or self._inner(tensors).reduce(tensors, opts)

    @torch_keywords
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce the r-th input tensors of all ranks, and store the result in the output tensor of rank r.

        Each rank passes a list with one input tensor per rank.  The tensors in the list may have different lengths.
        """
        outputs, inputs = one_tensor("reduce_scatter", outputs), one_list("reduce_scatter", inputs)
        opts = options_of(opts, dist.ReduceScatterOptions, reduceOp=opts)
        work = self._issue(table.REDUCE_SCATTER, [(outputs, inputs[0])], opts, timeout)
        return work or self._inner(outputs).reduce_scatter(outputs, inputs, opts)

    @torch_keywords
    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce `input` over all ranks, and store this rank's part of the result in `output`.

        `input` contains one part per rank, and all parts have the same length.
        """
        path = self._path(opts, timeout)
        if path and (work := path.reduce_scatter(output, input, hash(opts.reduceOp))):
            return work
        opts = options_of(opts, dist.ReduceScatterOptions, reduceOp=opts)
        return self.reduce_scatter_single_coalesced([output], [input], opts, timeout)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Run `reduce_scatter_single` for each pair of tensors."""
        outputs, inputs = tensors_of("reduce_scatter", outputs), tensor_list(inputs)
        opts = options_of(opts, dist.ReduceScatterOptions)
        same_count("reduce_scatter", "the output list", len(outputs), "the input list", len(inputs))
        pairs = [([output], [input]) for output, input in zip(outputs, inputs, strict=True)]
        work = self._issue(table.REDUCE_SCATTER, pairs, opts, timeout)
        return work or self._inner(outputs).reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- data movement ----

    @torch_keywords
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Copy the root's tensor to all other ranks."""
        path = self._path(opts, timeout)
        if path and type(tensors) is list and len(tensors) == 1:
            work: dist.Work | None = path.broadcast(tensors[0], opts.rootRank)
            if work is not None:
                return work
        tensors, opts = (
            one_tensor("broadcast", tensors),
            options_of(opts, dist.BroadcastOptions, rootRank=opts),
        )
        existing_rank("broadcast", "the root", opts.rootRank, self._size)
        work = self._issue(table.BROADCAST, [(tensors, tensors)], opts, timeout, opts.rootRank)
        return work or self._inner(tensors).broadcast(tensors, opts)

    @torch_keywords
    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Gather the tensors of all ranks into a list on every rank; the tensors may have different lengths."""
        path = self._path(opts, timeout)
        if path and len(inputs) == len(outputs) == 1 and (work := path.all_gather(outputs[0], inputs[0])):
            return work
        inputs, outputs = one_tensor("all_gather", inputs), one_list("all_gather", outputs)
        opts = options_of(opts, AllgatherOptions)
        work = self._issue(table.ALL_GATHER, [(outputs[0], inputs)], opts, timeout)
        return work or self._inner(inputs).allgather(outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Run `allgather` for each of `inputs`; `outputs[r][i]` receives `inputs[i]` of rank r."""
        same_count("all_gather_coalesced", "the output list", len(outputs), "the group", self._size)
        inputs, opts = tensors_of("all_gather_coalesced", inputs), options_of(opts, AllgatherOptions)
        for parts in outputs:
            same_count(
                "all_gather_coalesced", "a rank's output list", len(parts), "the input list", len(inputs)
            )
        pairs = [
            (tensor_list(parts), [input])
            for parts, input in zip(zip(*outputs, strict=True), inputs, strict=True)
        ]
        work = self._issue(table.ALL_GATHER, pairs, opts)
        return work or self._inner(inputs).allgather_coalesced(outputs, inputs, opts)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Gather the `input` of every rank into the tensor `output`; the inputs must have equal lengths."""
        path = self._path(opts, timeout)
        if path and (work := path.all_gather(output, input)):
            return work
        return self.all_gather_single_coalesced([output], [input], opts, timeout)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Run `all_gather_single` for each pair of tensors."""
        outputs, inputs = tensors_of("all_gather", outputs), tensor_list(inputs)
        opts = options_of(opts, AllgatherOptions)
        same_count("all_gather", "the output list", len(outputs), "the input list", len(inputs))
        pairs = [([output], [input]) for output, input in zip(outputs, inputs, strict=True)]
        work = self._issue(table.ALL_GATHER, pairs, opts, timeout)
        return work or self._inner(inputs).allgather_into_tensor_coalesced(outputs, inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @torch_keywords
    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Gather every rank's tensor into a list on the root."""
        outputs, inputs = one_list("gather", outputs or [[]]), one_tensor("gather", inputs)
        opts = options_of(opts, dist.GatherOptions, rootRank=opts)
        pairs = [(outputs[0], inputs)]
        work = self._issue(table.GATHER, pairs, opts, timeout, opts.rootRank, None)
        return work or self._inner(inputs).gather(outputs if outputs[0] else [], inputs, opts)

    def gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Gather every rank's tensor into one tensor on the root; `output` is unused on other ranks."""
        opts = options_of(opts, dist.GatherOptions, rootRank=opts)
        if self._rank != opts.rootRank:
            return self.gather([], [input], opts, timeout)
        all_inputs = input.numel() * self._size
        same_count("gather", "the output", output.numel(), "all inputs together", all_inputs)
        parts = [part.view(input.shape) for part in output.view(self._size, input.numel())]
        return self.gather([parts], [input], opts, timeout)

    gather_into_tensor = gather_single

    @torch_keywords
    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Send each tensor in the root's list to the corresponding rank."""
        outputs, inputs = one_tensor("scatter", outputs), one_list("scatter", inputs or [[]])
        opts = options_of(opts, dist.ScatterOptions, rootRank=opts)
        pairs = [(outputs, inputs[0])]
        work = self._issue(table.SCATTER, pairs, opts, timeout, opts.rootRank, None)
        return work or self._inner(outputs).scatter(outputs, inputs if inputs[0] else [], opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Send `inputs[j]` to rank j, and receive `outputs[i]` from rank i; tensors may differ in length."""
        outputs, inputs = tensors_of("all_to_all", outputs), tensors_of("all_to_all", inputs)
        opts = options_of(opts, dist.AllToAllOptions)
        work = self._issue(table.ALL_TO_ALL, [(outputs, inputs)], opts, timeout)
        return work or self._inner(inputs).alltoall(outputs, inputs, opts)

    @torch_keywords
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Send part j of `input` to rank j, and receive part i of `output` from rank i.

        If the lists of splits are empty, the parts have equal lengths.
        """
        path = None if output_splits or input_splits else self._path(opts, timeout)
        if path and (work := path.all_to_all(output, input)):
            return work
        (output,), (input,) = tensor_list(output), tensor_list(input)
        opts = options_of(opts, dist.AllToAllOptions)
        if not self._dispatcher.serves([output, input]) or self._host is None:
            return self._inner([input]).alltoall_base(output, input, output_splits, input_splits, opts)
        pair = table.exchanged(output, input, output_splits, input_splits, self._size)
        work = self._issue(table.ALL_TO_ALL, [pair], opts, timeout, written=[output])
        assert work is not None
        return work

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Start a barrier; the returned work completes when every rank has called `barrier`."""
        path = self._path(opts, timeout)
        if path and (work := path.barrier()):
            return work
        opts = options_of(opts, dist.BarrierOptions)
        return self._issue(table.BARRIER, [([], [])], opts, timeout) or self._inner().barrier(opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Block until every rank has called this method.

        Args:
            timeout: How long to wait; by default the group's timeout.
            wait_all_ranks: Whether the error names all late ranks on this host instead of one late rank.

        Raises:
            RankLate: if the timeout expires.
        """
        opts = dist.BarrierOptions()
        opts.asyncOp = False
        try:
            if self._issue(table.BARRIER, [([], [])], opts, timeout) is None:
                self._inner().monitored_barrier(timeout, wait_all_ranks)
        except RankLate as error:
            if not wait_all_ranks:
                raise
            raise RankLate(f"{error}; {self._dispatcher.core.whereabouts()}") from error

    # ---- point-to-point ----

    @torch_keywords
    def send(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        """Start sending a tensor to rank `peer` of the group."""
        if len(tensors) == 1 and (work := self._direct.post(tensors[0], peer, tag, sends=True)):
            return work
        return self.communicator.post(one_tensor("send", tensors)[0], peer, tag, sends=True)

    @torch_keywords
    def recv(self, tensors: Any, peer: int, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from rank `peer` of the group."""
        if len(tensors) == 1 and (work := self._direct.post(tensors[0], peer, tag, sends=False)):
            return work
        return self.communicator.post(one_tensor("recv", tensors)[0], peer, tag, sends=False)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Start receiving a tensor from any rank of the group."""
        return self.communicator.post(
            one_tensor("recv_anysource", tensors)[0], 0, tag, sends=False, any_rank=True
        )

    def post_batch(self, messages: Sequence[tuple[bool, Tensor, int, int]]) -> list[dist.Work]:
        """Post several messages together, and return their work objects.

        Each message is a tuple (is_send, tensor, peer, tag).
        """
        batch = self.communicator.batch()
        for sends, tensor, peer, tag in messages:
            (batch.send if sends else batch.recv)(tensor, peer, tag)
        return batch.start()

    # ---- calls ----

    def _path(self, opts: Any, timeout: timedelta | None) -> Any:
        """Return the fast path, or None if the call has its own timeout or `opts` is not a torch options object."""
        begun = getattr(opts, "asyncOp", None)
        if begun is None or timeout is not None or opts.timeout > _NO_TIMEOUT:
            return None
        return self._direct_async if begun else self._direct

    def _issue(
        self,
        operation: Operation,
        pairs: Sequence[Pair],
        opts: Any,
        timeout: timedelta | None = None,
        *constants: Any,
        written: Sequence[Tensor] | None = None,
        copies: Sequence[Tensor] = (),
    ) -> dist.Work | None:
        """Start one operation per pair of outputs and inputs; return None if the inner torch group must run them."""
        tensors = [each for outputs, inputs in pairs for each in (*outputs, *inputs)]
        if not self._dispatcher.serves(tensors) or self._host is None:
            self._agree_on_sparse(operation, tensors, opts)
            return None
        core, calls = self._dispatcher.core, []
        for outputs, inputs in pairs:
            reduction = [reduction_number(opts.reduceOp, outputs[0].dtype)] if operation.reduces else []
            calls.append(operation.call(core, outputs, inputs, *reduction, *constants))
        if written is None:
            written = [output for outputs, _ in pairs for output in outputs]
        # the operations write to `copies`, which replace the tensors in `written`
        if any(copy is not tensor for copy, tensor in zip(copies, written, strict=False)):
            calls.append(partial(_copy_back, written, copies))
        seconds = seconds_of(opts.timeout if timeout is None else timeout)
        return self._dispatcher.issue(_in_turn(calls), written, opts.asyncOp, timeout_s=seconds)

    def _agree_on_sparse(self, operation: Operation, tensors: Sequence[Tensor], opts: Any) -> None:
        """If one of `tensors` is sparse, check collectively that all ranks make the same call."""
        core = self._dispatcher.core
        if self._host is None or not isinstance(core, GroupCore):
            return
        sparse = next((tensor for tensor in tensors if tensor.layout is not torch.strided), None)
        if sparse is None:
            return
        call = CallRecord(
            operation=native.Operation[operation.name.upper()],
            type=TYPES[sparse.dtype],
            op=reduction_number(opts.reduceOp, sparse.dtype) if operation.reduces else 0,
            root=getattr(opts, "rootRank", -1),
            count=sparse.numel(),
            layout=SPARSE_LAYOUT,
        )
        self._dispatcher.queue.run(partial(core.agree, call), [])


def _copy_back(tensors: Sequence[Tensor], copies: Sequence[Tensor], flags: int) -> None:
    with torch.no_grad():
        copy_back(tensors, copies)


def _in_turn(calls: Sequence[Call]) -> Call:
    if len(calls) == 1:
        return calls[0]

    def run(flags: int) -> None:
        for call in calls:
            call(flags)

    return run
