"""The interface through which the benchmark calls each library, and its implementations for `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.bench.collectives.operations import ROOT, Operation
from farandole.comm.communicator import Communicator
from farandole.comm.dtypes import REDUCE_OPS
from farandole.launch.runtime import Runtime

Wait = Callable[[], Any]
"""A function that blocks until an operation is complete."""


class Implementation(Protocol):
    """An implementation under test: a library, and the kind of buffers that it uses."""

    name: str

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate a buffer.  This is a collective call."""

    def call(self, operation: Operation, reduction: str, input: Tensor, output: Tensor) -> Callable[[], Any]:
        """Return a function that runs the collective `operation` with these buffers and blocks until it is complete."""

    def begin(
        self, operation: Operation, reduction: str, input: Tensor, output: Tensor
    ) -> Callable[[], Wait]:
        """Return a function that starts the collective and returns a function that waits for its completion."""

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Send `tensor` to `peer`; when this call returns, the caller may change `tensor`."""

    def receive(self, tensor: Tensor, peer: int) -> Any:
        """Receive a message."""

    def begin_send(self, tensor: Tensor, peer: int) -> Wait:
        """Start a non-blocking send of `tensor` to `peer`, and return a function that waits for its completion."""

    def begin_receive(self, tensor: Tensor, peer: int) -> Wait:
        """Start a non-blocking receive into `tensor`, and return a function that waits for its completion."""


class Torch:
    """A process group of `torch.distributed` with CPU tensors."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name = name
        self._group = group

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate normal memory."""
        return torch.empty(count, dtype=dtype)

    def call(self, operation: Operation, reduction: str, input: Tensor, output: Tensor) -> Callable[[], Any]:
        """Return a function that calls torch's public function for the operation."""
        return self._of_torch(operation, reduction, input, output)

    def begin(
        self, operation: Operation, reduction: str, input: Tensor, output: Tensor
    ) -> Callable[[], Wait]:
        """Return a function that starts the operation with `async_op=True` and returns its `wait` method."""
        call = partial(self._of_torch(operation, reduction, input, output), async_op=True)
        return lambda: call().wait

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Send `tensor` to `peer` with the blocking `torch.distributed.send`."""
        return dist.send(tensor, group=self._group, group_dst=peer)

    def receive(self, tensor: Tensor, peer: int) -> Any:
        """Receive `tensor` from `peer` with the blocking `torch.distributed.recv`."""
        return dist.recv(tensor, group=self._group, group_src=peer)

    def begin_send(self, tensor: Tensor, peer: int) -> Wait:
        """Call `torch.distributed.isend`, and return a function that waits until the send is complete."""
        return _waiting(dist.isend(tensor, group=self._group, group_dst=peer))

    def begin_receive(self, tensor: Tensor, peer: int) -> Wait:
        """Call `torch.distributed.irecv`, and return a function that waits until the receive is complete."""
        return _waiting(dist.irecv(tensor, group=self._group, group_src=peer))

    def _of_torch(
        self, operation: Operation, reduction: str, input: Tensor, output: Tensor
    ) -> Callable[..., Any]:
        ranks, is_root = self._group.size(), self._group.rank() == ROOT
        # torch 2.13 renamed two functions and warns about the old names
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        op = REDUCE_OPS[reduction]
        call: Callable[..., Any] = {
            "all_reduce": lambda: partial(dist.all_reduce, input, op),
            "reduce_scatter": lambda: partial(reduce_scatter, output, input, op),
            "all_gather": lambda: partial(all_gather, output, input),
            "broadcast": lambda: partial(dist.broadcast, input, group_src=ROOT),
            "reduce": lambda: partial(dist.reduce, input, op=op, group_dst=ROOT),
            "all_to_all": lambda: partial(dist.all_to_all_single, output, input),
            "gather": lambda: partial(
                dist.gather, input, list(output.chunk(ranks)) if is_root else None, group_dst=ROOT
            ),
            "scatter": lambda: partial(
                dist.scatter, output, list(input.chunk(ranks)) if is_root else None, group_src=ROOT
            ),
            "barrier": lambda: partial(dist.barrier),
        }[operation.name]()
        return partial(call, group=self._group)


class Shared(Torch):
    """The farandole backend with buffers in shared memory."""

    def __init__(self, name: str, comm: Communicator) -> None:
        super().__init__(name, comm.group)
        self._comm = comm

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate shared memory."""
        return self._comm.empty(count, dtype=dtype)


class Nccl(Torch):
    """NCCL with tensors on this rank's accelerator; blocking calls return after the accelerator has finished."""

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(name, group)
        self._device = device

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory on the accelerator."""
        return torch.empty(count, dtype=dtype, device=self._device)

    def call(self, operation: Operation, reduction: str, input: Tensor, output: Tensor) -> Callable[[], Any]:
        """Return a function that calls torch's function and then synchronizes the accelerator."""
        call = super().call(operation, reduction, input, output)
        return lambda: self._after(call())

    def begin(
        self, operation: Operation, reduction: str, input: Tensor, output: Tensor
    ) -> Callable[[], Wait]:
        """Return a function that enqueues the operation and returns a function that synchronizes the accelerator."""
        call = super().call(operation, reduction, input, output)

        def begin() -> Wait:
            call()
            return self._after

        return begin

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Send `tensor` to `peer`, and wait until the accelerator has finished."""
        self._after(super().send(tensor, peer))

    def receive(self, tensor: Tensor, peer: int) -> Any:
        """Receive `tensor` from `peer`, and wait until the accelerator has finished."""
        self._after(super().receive(tensor, peer))

    def begin_send(self, tensor: Tensor, peer: int) -> Wait:
        """Enqueue a send of `tensor`, and return a function that waits until the accelerator has finished."""
        return partial(self._after, super().begin_send(tensor, peer))

    def begin_receive(self, tensor: Tensor, peer: int) -> Wait:
        """Enqueue a receive into `tensor`, and return a function that waits until the accelerator has finished."""
        return partial(self._after, super().begin_receive(tensor, peer))

    def _after(self, _: Any = None) -> None:
        torch.cuda.synchronize(self._device)


def make_implementations(names: tuple[str, ...], runtime: Runtime) -> list[Implementation]:
    """Return an implementation for each of `names`, in the same order.  This is a collective call."""
    comm = runtime.comm

    def over_mpi() -> Implementation:
        from farandole.bench.collectives.mpi import Mpi

        return Mpi("mpi", comm.rank, comm.size)

    makers: dict[str, Callable[[], Implementation]] = {
        "farandole": lambda: Torch("farandole", comm.group),
        "shared": lambda: Shared("shared", comm),
        "gloo": lambda: Torch("gloo", dist.new_group(backend="gloo")),
        # before "mpi", because this backend requests its thread level from MPI
        "farandole-mpi": lambda: Torch("farandole-mpi", dist.new_group(backend="farandole-mpi")),
        "mpi": over_mpi,
        "nccl": lambda: Nccl("nccl", dist.new_group(backend="nccl"), runtime.device),
    }
    made = {name: make() for name, make in makers.items() if name in names}
    return [made[name] for name in names]


def _waiting(work: dist.Work | None) -> Wait:
    assert work is not None  # None for ranks outside the group
    return work.wait
