"""The seam between the benchmark of collectives and the libraries that it measures; and those of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.bench.collectives_operations import ROOT, Operation
from farandole.comm.communicator import Communicator
from farandole.comm.dtypes import REDUCE_OPS
from farandole.launch.runtime import Runtime

Wait = Callable[[], Any]
"""Blocks until what was begun is complete."""


class Contender(Protocol):
    """One library, or one way to use it."""

    name: str

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """A buffer; called by all ranks."""

    def call(self, operation: Operation, reduction: str, input: Tensor, output: Tensor) -> Callable[[], Any]:
        """A function that makes the collective and returns when this rank may go on."""

    def begin(
        self, operation: Operation, reduction: str, input: Tensor, output: Tensor
    ) -> Callable[[], Wait]:
        """A function that only begins the collective."""

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Send a message; returns when the tensor may be changed."""

    def receive(self, tensor: Tensor, peer: int) -> Any:
        """Receive a message."""

    def begin_send(self, tensor: Tensor, peer: int) -> Wait:
        """Begin to send."""

    def begin_receive(self, tensor: Tensor, peer: int) -> Wait:
        """Begin to receive."""


class Torch:
    """A process group of `torch.distributed`, with CPU tensors."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name = name
        self._group = group

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Ordinary memory."""
        return torch.empty(count, dtype=dtype)

    def call(self, operation: Operation, reduction: str, input: Tensor, output: Tensor) -> Callable[[], Any]:
        """Torch's function, called as a program calls it."""
        return self._of_torch(operation, reduction, input, output)

    def begin(
        self, operation: Operation, reduction: str, input: Tensor, output: Tensor
    ) -> Callable[[], Wait]:
        """The same with `async_op=True`."""
        call = partial(self._of_torch(operation, reduction, input, output), async_op=True)
        return lambda: call().wait

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Blocking."""
        return dist.send(tensor, group=self._group, group_dst=peer)

    def receive(self, tensor: Tensor, peer: int) -> Any:
        """Blocking."""
        return dist.recv(tensor, group=self._group, group_src=peer)

    def begin_send(self, tensor: Tensor, peer: int) -> Wait:
        """Not blocking."""
        return _waiting(dist.isend(tensor, group=self._group, group_dst=peer))

    def begin_receive(self, tensor: Tensor, peer: int) -> Wait:
        """Not blocking."""
        return _waiting(dist.irecv(tensor, group=self._group, group_src=peer))

    def _of_torch(
        self, operation: Operation, reduction: str, input: Tensor, output: Tensor
    ) -> Callable[..., Any]:
        ranks, is_root = self._group.size(), self._group.rank() == ROOT
        # torch 2.13 has renamed two functions, and warns of the earlier names
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
    """Our backend, with buffers that all ranks of a host share."""

    def __init__(self, name: str, comm: Communicator) -> None:
        super().__init__(name, comm.group)
        self._comm = comm

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of all ranks."""
        return self._comm.empty(count, dtype=dtype)


class Nccl(Torch):
    """NCCL, with tensors on this rank's accelerator; a call is over when the accelerator has done it."""

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(name, group)
        self._device = device

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of the accelerator."""
        return torch.empty(count, dtype=dtype, device=self._device)

    def call(self, operation: Operation, reduction: str, input: Tensor, output: Tensor) -> Callable[[], Any]:
        """Torch's function, and the wait for the accelerator."""
        call = super().call(operation, reduction, input, output)
        return lambda: self._after(call())

    def begin(
        self, operation: Operation, reduction: str, input: Tensor, output: Tensor
    ) -> Callable[[], Wait]:
        """Enqueue it."""
        call = super().call(operation, reduction, input, output)

        def begin() -> Wait:
            call()
            return self._after

        return begin

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Until it is sent."""
        self._after(super().send(tensor, peer))

    def receive(self, tensor: Tensor, peer: int) -> Any:
        """Until it is there."""
        self._after(super().receive(tensor, peer))

    def begin_send(self, tensor: Tensor, peer: int) -> Wait:
        """Enqueue it."""
        return partial(self._after, super().begin_send(tensor, peer))

    def begin_receive(self, tensor: Tensor, peer: int) -> Wait:
        """Enqueue it."""
        return partial(self._after, super().begin_receive(tensor, peer))

    def _after(self, _: Any = None) -> None:
        torch.cuda.synchronize(self._device)


def make_contenders(names: tuple[str, ...], runtime: Runtime) -> list[Contender]:
    """One of each name, in this order; called by all ranks."""
    comm = runtime.comm

    def over_mpi() -> Contender:
        from farandole.bench.collectives_mpi import Mpi

        return Mpi("mpi", comm.rank, comm.size)

    makers: dict[str, Callable[[], Contender]] = {
        "farandole": lambda: Torch("farandole", comm.group),
        "shared": lambda: Shared("shared", comm),
        "gloo": lambda: Torch("gloo", dist.new_group(backend="gloo")),
        # before "mpi": it asks MPI for the threads that it needs
        "farandole-mpi": lambda: Torch("farandole-mpi", dist.new_group(backend="farandole-mpi")),
        "mpi": over_mpi,
        "nccl": lambda: Nccl("nccl", dist.new_group(backend="nccl"), runtime.device),
    }
    made = {name: make() for name, make in makers.items() if name in names}
    return [made[name] for name in names]


def _waiting(work: dist.Work | None) -> Wait:
    assert work is not None  # None is for ranks outside of the group
    return work.wait
