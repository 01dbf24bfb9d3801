"""Torch process groups, which are used if the C core is missing or does not support a tensor."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from farandole.comm.core import Parts
from farandole.comm.dtypes import REDUCE_OPS
from farandole.comm.reduce_rows import reduce_rows
from farandole.comm.work import COMPLETED, Call, FutureWork

_REDUCE_OPS = list(REDUCE_OPS.values())


def has_nccl() -> bool:
    """Return whether NCCL and a CUDA device are available."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, address: str | None
) -> dist.ProcessGroupGloo:
    """Return a Gloo group that listens on `address` (None: the address to which this host's name resolves)."""
    if address is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupNCCL:
    """Return an NCCL group that uses each rank's current CUDA device."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def torch_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, address: str | None
) -> dist.ProcessGroup:
    """Return a Gloo group for CPU tensors; Gloo connects every pair of ranks immediately."""
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(dist.PrefixStore("torch/", store), rank, size)
    gloo = gloo_group(dist.PrefixStore("gloo/", store), rank, size, timeout, address)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    group._set_default_backend(kinds.GLOO)
    group._set_group_name(f"{name}/torch")  # type: ignore[arg-type]  # a NewType of str
    return group


def torch_device_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, name: str
) -> dist.ProcessGroup:
    """Return an NCCL group for CUDA tensors; NCCL connects ranks on the first call."""
    if not has_nccl():
        raise RuntimeError(
            f"group {name!r}: expected CPU tensors, got CUDA tensors; copy the tensors to the CPU, because this build "
            "of torch has no NCCL"
        )
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(dist.PrefixStore("torch-cuda/", store), rank, size)
    nccl = nccl_group(dist.PrefixStore("nccl/", store), rank, size, timeout)
    group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    group._set_default_backend(kinds.NCCL)
    group._set_group_name(f"{name}/torch-cuda")  # type: ignore[arg-type]  # a NewType of str
    return group


def local_group(parent: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a torch group of the global ranks `ranks`; only these ranks call this function.

    The ranks must be members of `parent`.

    `new_group(use_local_synchronization=True)` derives the group name from the number of groups that a rank has
    created.  Ranks that have created different numbers of groups would choose different names and wait for each other
    forever.  This function therefore derives the name from the number of groups that it
    has created for the same ranks.
    """
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, Counter())
    among = f"{parent.group_name}/{'-'.join(map(str, ranks))}"
    name = f"{among}/{made[among]}"
    made[among] += 1
    plain = distributed_c10d._process_group_name
    setattr(distributed_c10d, "_process_group_name", lambda *_, **__: name)  # noqa: B010 - a NewType of str
    try:
        group = dist.new_group(list(ranks), backend=dist.get_backend(parent), use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = plain
    assert isinstance(group, dist.ProcessGroup)  # not a placeholder: this rank is a member
    return group


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""For each default group, the number of groups that `local_group` has created per parent and list of ranks."""


class TorchCore:
    """A `Core` that uses a torch process group, such as Gloo or NCCL.  Its methods return torch's work objects.

    Args:
        make: A function that returns the group; all ranks call this function on first use of the group.
        rank: This rank in the group.
        size: The number of ranks.
        name: The name of the backend in error messages.
        cpu_only: Whether the group supports only CPU tensors.
    """

    returns_work = True
    completes_at_exit = True
    shares_memory = False
    closed = False

    def __init__(
        self,
        make: Callable[[], dist.ProcessGroup],
        rank: int,
        size: int,
        name: str,
        *,
        cpu_only: bool = False,
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._cpu_only = cpu_only
        self._make = make
        self._group: dist.ProcessGroup | None = None
        self._making = threading.Lock()
        self._timeout: timedelta | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, created on first use."""
        with self._making:
            if self._group is None:
                self._group = self._make()
                if self._timeout is not None:
                    self._group.set_timeout(self._timeout)
            return self._group

    def supports(self, tensors: Sequence[Tensor]) -> bool:
        """Return False for CUDA tensors if the group supports only CPU tensors, else True.

        For other unsupported tensors, torch raises an error.
        """
        return not (self._cpu_only and any(tensor.is_cuda for tensor in tensors))

    def prepare(self, operation: str, *arguments: Any) -> Callable[[int], Any]:
        """Return a callable that takes `flags` and runs the operation with `arguments` on each call."""
        return partial(getattr(self, operation), *arguments)

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return the name of the backend; the backend selects the algorithm."""
        return self.name

    def check(self, status: dist.Work) -> None:
        """Block until `status`, the work of a call, is complete."""
        status.wait()

    # ---- collectives ----

    def all_reduce(self, output: Tensor, input: Tensor, reduction: int, flags: int) -> dist.Work:
        """Reduce `input` over all ranks into `output`."""
        if output is not input:
            output.copy_(input.view(output.shape))
        return self.group.allreduce(
            [output], _options(dist.AllreduceOptions, reduceOp=_REDUCE_OPS[reduction])
        )

    def reduce(
        self, output: Tensor | None, input: Tensor, reduction: int, root: int, flags: int
    ) -> dist.Work:
        """Reduce `input` over all ranks into `output` on rank `root`."""
        if output is None:
            output = input.clone()  # Gloo overwrites this tensor
        elif output is not input:
            output.copy_(input.view(output.shape))
        options = _options(dist.ReduceOptions, reduceOp=_REDUCE_OPS[reduction], rootRank=root)
        return self.group.reduce([output], options)

    def reduce_scatter(self, output: Tensor, inputs: Parts, reduction: int, flags: int) -> dist.Work:
        """Reduce `inputs` over all ranks and store this rank's part in `output`."""
        options = _options(dist.ReduceScatterOptions, reduceOp=_REDUCE_OPS[reduction])
        if len(inputs) == 1:
            if output.device.type == "cpu" and self._is_gloo:
                return self._exchange_and_reduce(output, inputs[0], reduction)
            method = _first_of(self.group, "reduce_scatter_single", "_reduce_scatter_base")
            return method(output, inputs[0], options)
        parts = _padded(inputs)
        if parts is None:
            return self.group.reduce_scatter([output], [list(inputs)], options)
        own = torch.empty_like(parts[0])
        self.group.reduce_scatter([own], [parts], options).wait()
        output.copy_(own[: output.numel()].view(output.shape))
        return COMPLETED

    @property
    def _is_gloo(self) -> bool:
        return isinstance(self.group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)

    def _exchange_and_reduce(self, output: Tensor, input: Tensor, reduction: int) -> dist.Work:
        """Send part r of `input` to rank r, and reduce the received parts into `output`."""
        # torch's own implementation all-reduces all parts and therefore sends twice as many bytes
        parts = input.new_empty((self.size, output.numel()))
        inference = torch.is_inference_mode_enabled()  # required for writing inference tensors

        def reduce(exchanged: torch.futures.Future[Any]) -> list[Tensor]:
            exchanged.value()  # raises the error of a failed exchange
            with torch.inference_mode(inference):
                output.copy_(reduce_rows(parts, reduction).view(output.shape))
            return [output]

        exchange = _first_of(self.group, "all_to_all_single", "alltoall_base")
        exchanged = exchange(parts.view(-1), input.reshape(-1), [], [])
        return FutureWork(exchanged, exchanged.get_future().then(reduce), [output])

    def all_gather(self, outputs: Parts, input: Tensor, flags: int) -> dist.Work:
        """Gather every rank's `input` into `outputs`."""
        if len(outputs) == 1:
            return _first_of(self.group, "all_gather_single", "_allgather_base")(outputs[0], input)
        parts = _padded(outputs)
        if parts is None:
            return self.group.allgather([list(outputs)], [input])
        own = _pad(input, len(parts[0]))
        self.group.allgather([parts], [own]).wait()
        return _unpad(outputs, parts)

    def broadcast(self, output: Tensor | None, input: Tensor | None, root: int, flags: int) -> dist.Work:
        """Copy `input` from rank `root` to `output` on the other ranks."""
        tensor = output if input is None else input
        assert tensor is not None
        return self.group.broadcast([tensor], _options(dist.BroadcastOptions, rootRank=root))

    def gather(
        self, outputs: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int] | None, flags: int
    ) -> dist.Work:
        """Gather every rank's `input` into `outputs` on rank `root`."""
        options = _options(dist.GatherOptions, rootRank=root)
        if counts is None:
            return self.group.gather([list(outputs)] if outputs else [], [input], options)
        parts = [input.new_empty(max(counts)) for _ in outputs]
        self.group.gather([parts] if outputs else [], [_pad(input, max(counts))], options).wait()
        return _unpad(outputs, parts)

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor], root: int, counts: Sequence[int] | None, flags: int
    ) -> dist.Work:
        """Send `inputs[r]` from rank `root` to `output` on rank r."""
        options = _options(dist.ScatterOptions, rootRank=root)
        if counts is None:
            return self.group.scatter([output], [list(inputs)] if inputs else [], options)
        own = output.new_empty(max(counts))
        self.group.scatter(
            [own], [[_pad(each, max(counts)) for each in inputs]] if inputs else [], options
        ).wait()
        return _unpad([output], [own])

    def all_to_all(self, outputs: Parts, inputs: Parts, flags: int) -> dist.Work:
        """Send part j of `inputs` to rank j, and receive part i of `outputs` from rank i."""
        method = _first_of(self.group, "all_to_all_single", "alltoall_base")
        if len(inputs) == 1:
            return method(outputs[0], inputs[0], [], [])
        received, sent = [each.numel() for each in outputs], [each.numel() for each in inputs]
        output = outputs[0].new_empty(sum(received))
        method(output, torch.cat([each.reshape(-1) for each in inputs]), received, sent).wait()
        return _unpad(outputs, output.split(received))

    def scan(self, output: Tensor, input: Tensor, reduction: int, exclusive: bool, flags: int) -> dist.Work:
        """Reduce the inputs of ranks 0 to `rank` into `output`; if `exclusive`, exclude this rank's input.

        An exclusive scan leaves `output` on rank 0 unchanged.
        """
        rows = [torch.empty_like(input) for _ in range(self.size)]
        self.group.allgather([rows], [input]).wait()
        last = self.rank - exclusive
        if last >= 0:
            flat = torch.stack([row.view(-1) for row in rows[: last + 1]])
            output.copy_(reduce_rows(flat.cpu(), reduction).view(output.shape))
        return COMPLETED

    def barrier(self, flags: int) -> dist.Work:
        """Start a barrier; return a work object that completes when every rank has called this method."""
        return self.group.barrier()

    # ---- point-to-point ----

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start sending `tensor` to rank `peer`."""
        return self.group.send([tensor], peer, tag)

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start receiving into `tensor` from rank `peer`, or from any rank if `peer` is -1."""
        return self.group.recv([tensor], peer, tag) if peer >= 0 else self.group.recv_anysource([tensor], tag)

    def post_batch(self, messages: Sequence[tuple[bool, Tensor, int, int]]) -> list[dist.Work]:
        """Start a batch of sends and receives.

        Outside a batch, NCCL runs messages one after the other, so two ranks that both send first would deadlock.

        Args:
            messages: One tuple per message: whether the message is a send, the tensor, the peer and the tag.
        """
        group, device = self.group, messages[0][1].device
        coalesces = getattr(group._get_backend(device), "supports_coalescing", False)
        if coalesces:
            group._start_coalescing(device)
        works = [
            self.post_send(tensor, peer, tag) if sends else self.post_recv(tensor, peer, tag)
            for sends, tensor, peer, tag in messages
        ]
        if not coalesces:
            return works
        work = group._end_coalescing(device)
        return [] if work is None else [work]

    # ---- memory and shutdown ----

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return a tensor in private memory."""
        return torch.empty(*shape, dtype=dtype, device="cpu")

    def receive_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in private memory."""
        return self.allocate(shape, dtype, 0)

    def allocate_shared(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Raise NotImplementedError, because torch's groups do not share memory."""
        raise NotImplementedError(
            "cannot allocate a shared tensor: torch's process groups do not share memory; use `empty` instead"
        )

    def subgroup(self, members: Sequence[int]) -> None:
        """Return None, because torch must create the group."""

    def whereabouts(self) -> str:
        """Return a description that contains only the backend name; torch does not expose the current call."""
        return f"a {self.name} call"

    def set_roles(self, roles: Sequence[str]) -> None:
        """Do nothing; torch's error messages do not name ranks."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may wait for other ranks."""
        self._timeout = timeout
        if self._group is not None:
            self._group.set_timeout(timeout)

    def within(self, timeout_s: float, call: Call) -> Call:
        """Return `call` unchanged, because torch takes the timeout of a call from the options of the call."""
        return call

    def leave(self, note: str) -> None:
        """Do nothing; torch's groups cannot notify the other ranks."""

    def give_up(self) -> None:
        """Do nothing; torch's calls end when their timeout expires."""

    def rest(self, patience_s: float) -> bool:
        """Return True; torch's threads end when the group is destroyed."""
        return True

    def close(self) -> None:
        """Shut down the group if it has been created."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


def _options(kind: type, **fields: Any) -> Any:
    options = kind()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _first_of(group: dist.ProcessGroup, *names: str) -> Callable[..., dist.Work]:
    """Return the first method in `names` that `group` has; the methods differ between torch versions."""
    return next(getattr(group, name) for name in names if hasattr(group, name))


def _pad(tensor: Tensor, count: int) -> Tensor:
    padded = tensor.new_zeros(count)
    padded[: tensor.numel()] = tensor.reshape(-1)
    return padded


def _padded(parts: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the tensors padded to equal length for Gloo, or None if the lengths are already equal."""
    longest = max(part.numel() for part in parts)
    if all(part.numel() == longest for part in parts):
        return None
    return [_pad(part, longest) for part in parts]


def _unpad(tensors: Sequence[Tensor], padded: Sequence[Tensor]) -> dist.Work:
    for tensor, part in zip(tensors, padded, strict=True):
        tensor.copy_(part[: tensor.numel()].view(tensor.shape))
    return COMPLETED
