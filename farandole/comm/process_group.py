"""The `torch.distributed` backend named `farandole`: a process group in Python over the C core.

CPU tensors of ranks that share a host go through shared memory.  All else goes to an inner process group of
torch's own, made when it is first needed: CUDA tensors to NCCL, sparse tensors and groups that span hosts
to Gloo.

The methods have the names and arguments that torch calls, from Python and (through pybind11) from C++:
DDP's reducer, functional collectives, autograd.  torch 2.13 renamed some of them; both spellings are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import collectives
from farandole.comm.dtypes import REDUCTION_NAMES, REDUCTIONS, TYPES, reducible
from farandole.comm.fallback import LazyBackend, torch_group
from farandole.comm.host_group import HostGroup, NotOnOneHost
from farandole.comm.messages import MessageWork
from farandole.comm.remark import say_once
from farandole.comm.work import Call, Lane

_SPARE_TIMEOUT = timedelta(minutes=30)


def create(options: Any, backend_options: Any = None) -> FarandoleProcessGroup:
    """What `init_process_group("farandole")` and `new_group` call, on every rank of the group."""
    store, rank, size = options.store, options.group_rank, options.group_size
    ranks = list(options.global_ranks_in_group) or list(range(size))
    name = options.group_id or "default"
    timeout = options.timeout or _SPARE_TIMEOUT
    try:
        host = HostGroup.meet(dist.PrefixStore("host/", store), rank, size, timeout, str(name), ranks)
    except NotOnOneHost as reason:
        if rank == 0:
            say_once(f"group {name!r} communicates through Gloo: {reason}")
        host = None
    return FarandoleProcessGroup(store, rank, size, timeout, str(name), host)


class FarandoleProcessGroup(dist.ProcessGroup):
    """A process group of the `farandole` backend.  Made by `torch.distributed`, not by hand."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, host: HostGroup | None
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._store = store
        self._timeout = timeout
        self._group_name = name
        self._group_desc = "undefined"
        self._host = host
        self._lane = Lane(name)
        self._torch_group: dist.ProcessGroup | None = None
        self._unwaited: list[MessageWork] = []
        if host is not None:
            self._core_all_reduce = host.core.frd_all_reduce

    # ---- what torch asks a group about itself ----

    def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
        """The name of the backend."""
        return "farandole"

    def name(self) -> str:
        """The name of the backend."""
        return "farandole"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch after construction."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """By which functional collectives find the group."""
        return self._group_name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Called by torch after construction."""
        self._group_desc = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for, in words."""
        return self._group_desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """By which functional collectives find the group."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """What the group is for, in words."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        devices = [torch.device("cpu")]
        if torch.cuda.is_available() and dist.is_nccl_available():
            devices.append(torch.device("cuda"))
        return devices

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        if device.type == "cpu" and self._host is not None:
            return LazyBackend(self._inner)
        return self._inner()._get_backend(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a call waits for the other ranks."""
        self._timeout = timeout
        if self._host is not None:
            self._host.set_timeout(timeout)
        if self._torch_group is not None:
            self._torch_group.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group; ranks that still wait for this one are told."""
        self._lane.close()
        if self._host is not None:
            self._unwaited = [work for work in self._unwaited if not work.is_completed()]
            if self._unwaited:
                self._host.leave("it destroyed the group with messages under way")
            else:
                self._host.close()
        if self._torch_group is not None:
            self._torch_group.shutdown()
            self._torch_group = None

    def abort(self) -> None:
        """The same as `shutdown`."""
        self.shutdown()

    def allocate_shared(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that every rank of the group can reach: see `Communicator.empty`."""
        host = self._host
        if host is None:
            return torch.empty(*shape, dtype=dtype)
        made: list[Tensor] = []
        self._lane.run(lambda flags: made.append(host.allocate(shape, dtype)), [])
        return made[0]

    def _inner(self) -> dist.ProcessGroup:
        """torch's own group over the same ranks; making it is a collective call."""
        if self._torch_group is None:
            self._torch_group = torch_group(self._store, self._rank, self._size, self._timeout, self._group_name)
        return self._torch_group

    def _on_host(self, *tensors: Tensor) -> HostGroup | None:
        """The host group if it can take these tensors, None if they must go another way."""
        if self._host is None or not all(t.is_cpu and t.layout is torch.strided for t in tensors):
            return None
        if self._host.handle is None:
            raise RuntimeError(f"group {self._group_name!r} was destroyed; make a new one")
        return self._host

    def _issue(self, call: Call, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Run a call in its turn: now, if the caller will wait for it at once."""
        if opts is None or opts.asyncOp:
            return self._lane.submit(call, tensors)
        return self._lane.run(call, tensors)

    # ---- reductions ----

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce each tensor over all ranks, in place."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if not hasattr(opts, "asyncOp"):  # called with a reduction instead of options
            opts = _options(dist.AllreduceOptions(), opts)
        tensor = tensors[0]
        host = self._on_host(*tensors)
        if host is None:
            return self._inner().allreduce(tensors, opts)
        reduction = _reduction(opts.reduceOp, tensor.dtype)
        if len(tensors) > 1 or not collectives.is_dense(tensor) or tensor.is_complex():
            return self._issue(collectives.all_reduce(host, tensors, reduction), tensors, opts)

        # the common case, with as little as possible between the caller and the core
        core, handle, kind = self._core_all_reduce, host.handle, TYPES[tensor.dtype]
        address, count = tensor.data_ptr(), tensor.numel()

        def call(flags: int) -> None:
            status = core(handle, address, count, kind, reduction, flags)
            if status:
                host.check(status)

        if opts.asyncOp:
            return self._lane.submit(call, tensors)
        return self._lane.run(call, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce a list of tensors over all ranks, in place."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce over all ranks into the tensor of the root."""
        if isinstance(tensors, Tensor):
            tensors, opts = [tensors], _options(dist.ReduceOptions(), op, rootRank=opts)
        host = self._on_host(*tensors)
        if host is None:
            return self._inner().reduce(tensors, opts)
        reduction = _reduction(opts.reduceOp, tensors[0].dtype)
        return self._issue(collectives.reduce(host, tensors[0], opts.rootRank, reduction), tensors, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce lists of tensors (one per rank, lengths may differ) and keep this rank's."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if not hasattr(opts, "asyncOp"):
            opts = _options(dist.ReduceScatterOptions(), opts)
        host = self._on_host(*outputs, *inputs[0])
        if host is None:
            return self._inner().reduce_scatter(outputs, inputs, opts)
        _same_count("reduce_scatter", "the input list", len(inputs[0]), "the group", self._size)
        reduction = _reduction(opts.reduceOp, outputs[0].dtype)
        calls = [collectives.reduce_scatter(host, out, parts, reduction) for out, parts in zip(outputs, inputs)]
        return self._issue(_in_turn(calls), outputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce one tensor of equal parts and keep this rank's part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """`reduce_scatter_single` for each pair."""
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        host = self._on_host(*outputs, *inputs)
        if host is None:
            return self._inner().reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        calls = []
        for output, tensor in zip(outputs, inputs, strict=True):
            _same_count("reduce_scatter", "the input", tensor.numel(), "outputs of all", output.numel() * self._size)
            reduction = _reduction(opts.reduceOp, tensor.dtype)
            calls.append(collectives.reduce_scatter_even(host, output, tensor, reduction))
        return self._issue(_in_turn(calls), outputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- moving data ----

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Copy the root's tensor to all ranks."""
        if isinstance(tensors, Tensor):
            tensors, opts = [tensors], _options(dist.BroadcastOptions(), None, rootRank=opts)
        host = self._on_host(*tensors)
        if host is None:
            return self._inner().broadcast(tensors, opts)
        return self._issue(collectives.broadcast(host, tensors[0], opts.rootRank), tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Collect every rank's tensor (lengths may differ) in a list on every rank."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if not hasattr(opts, "asyncOp"):
            opts = dist.AllgatherOptions()
        host = self._on_host(*inputs, *outputs[0])
        if host is None:
            return self._inner().allgather(outputs, inputs, opts)
        return self.allgather_coalesced(outputs, inputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """`allgather` for each input."""
        host = self._on_host(*inputs)
        if host is None:
            return self._inner().allgather_coalesced(outputs, inputs, opts)
        # torch hands some coalesced callers' outputs over by rank, some by tensor; ours are by tensor
        calls = []
        for parts, tensor in zip(outputs, inputs, strict=True):
            _same_count("all_gather", "the output list", len(parts), "the group", self._size)
            own = parts[self._rank].numel()
            _same_count("all_gather", "the input", tensor.numel(), "this rank's output", own)
            calls.append(collectives.all_gather(host, parts, tensor))
        return self._issue(_in_turn(calls), [part for parts in outputs for part in parts], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Concatenate every rank's tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """`all_gather_single` for each pair."""
        host = self._on_host(*outputs, *inputs)
        if host is None:
            return self._inner().allgather_into_tensor_coalesced(outputs, inputs, opts or dist.AllgatherOptions())
        calls = []
        for output, tensor in zip(outputs, inputs, strict=True):
            _same_count("all_gather", "the output", output.numel(), "inputs of all", tensor.numel() * self._size)
            calls.append(collectives.all_gather_even(host, output, tensor))
        return self._issue(_in_turn(calls), outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Collect every rank's tensor in a list on the root."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
            opts = _options(dist.GatherOptions(), None, rootRank=opts)
        parts = outputs[0] if outputs else []
        host = self._on_host(*inputs, *parts)
        if host is None:
            return self._inner().gather(outputs, inputs, opts)
        if self._rank == opts.rootRank:
            _same_count("gather", "the output list", len(parts), "the group", self._size)
        return self._issue(collectives.gather(host, parts, inputs[0], opts.rootRank), parts, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Give every rank its tensor of the root's list."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
            opts = _options(dist.ScatterOptions(), None, rootRank=opts)
        parts = inputs[0] if inputs else []
        host = self._on_host(*outputs, *parts)
        if host is None:
            return self._inner().scatter(outputs, inputs, opts)
        if self._rank == opts.rootRank:
            _same_count("scatter", "the input list", len(parts), "the group", self._size)
        return self._issue(collectives.scatter(host, outputs[0], parts, opts.rootRank), outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Send input j to rank j and receive output i from rank i; lengths may differ."""
        opts = opts if hasattr(opts, "asyncOp") else dist.AllToAllOptions()
        host = self._on_host(*outputs, *inputs)
        if host is None:
            return self._inner().alltoall(outputs, inputs, opts)
        _same_count("all_to_all", "the input list", len(inputs), "the group", self._size)
        _same_count("all_to_all", "the output list", len(outputs), "the group", self._size)
        return self._issue(collectives.all_to_all(host, outputs, inputs), outputs, opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """The same with parts of one tensor, split along dimension 0 (evenly where no splits are given)."""
        opts = opts if hasattr(opts, "asyncOp") else dist.AllToAllOptions()
        host = self._on_host(output, input)
        if host is None:
            return self._inner().alltoall_base(output, input, output_splits, input_splits, opts)
        call = collectives.all_to_all_single(host, output, input, list(output_splits), list(input_splits))
        return self._issue(call, [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Wait until every rank is here."""
        if self._host is None:
            return self._inner().barrier(opts) if opts is not None else self._inner().barrier()
        host = self._on_host()
        assert host is not None
        return self._issue(lambda flags: host.check(host.core.frd_barrier(host.handle, flags)), [], opts)

    # ---- point to point ----

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Send a tensor to a rank of the group; returns at once."""
        return self._message(tensors[0], peer, tag, sends=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from a rank of the group; returns at once."""
        return self._message(tensors[0], peer, tag, sends=False)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Receive a tensor from any rank of the group; returns at once."""
        return self._message(tensors[0], -1, tag, sends=False)

    def _message(self, tensor: Tensor, peer: int, tag: int, *, sends: bool) -> dist.Work:
        host = self._on_host(tensor)
        if host is None:
            inner = self._inner()
            if sends:
                return inner.send([tensor], peer, tag)
            return inner.recv([tensor], peer, tag) if peer >= 0 else inner.recv_anysource([tensor], tag)
        if peer == self._rank:
            raise ValueError(f"rank {peer} cannot exchange messages with itself")
        work = MessageWork(host, tensor, peer, tag, sends=sends)
        # a message that nobody waits for must stay alive until it has moved
        self._unwaited = [other for other in self._unwaited if not other.is_completed()]
        if not work.is_completed():
            self._unwaited.append(work)
        return work


def _options(options: Any, reduction: Any, **fields: Any) -> Any:
    if reduction is not None:
        options.reduceOp = reduction
    for name, value in fields.items():
        setattr(options, name, value)
    options.asyncOp = True
    return options


def _reduction(op: dist.ReduceOp, dtype: torch.dtype) -> int:
    """The core's number of a reduction; ValueError where it does not exist for the type."""
    number = REDUCTIONS.get(hash(op))
    if number is None:
        raise ValueError(f"reduction {op} is not supported; these are: {', '.join(REDUCTION_NAMES)}")
    base = torch.float32 if dtype.is_complex else dtype
    if dtype.is_complex and REDUCTION_NAMES[number] not in ("sum", "avg") or not reducible(base, number):
        raise ValueError(f"reduction {REDUCTION_NAMES[number]} does not exist for {dtype}")
    return number


def _same_count(call: str, what: str, found: int, which: str, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{call}: {what} has {found}, {which} {expected}")


def _in_turn(calls: Sequence[Callable[[int], None]]) -> Call:
    if len(calls) == 1:
        return calls[0]

    def run(flags: int) -> None:
        for call in calls:
            call(flags)

    return run
