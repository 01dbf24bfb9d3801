"""MPI through mpi4py, called as in a typical MPI program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farandole.bench.collectives.implementations import Wait
from farandole.bench.collectives.operations import ROOT, Operation
from farandole.bench.options import BenchError

REDUCIBLE = ("float32", "float64", "int8", "uint8", "int16", "int32", "int64")
"""The dtypes that this benchmark can reduce with mpi4py.

Operations without a reduction support all dtypes, because they transfer the elements as bytes.
"""

_REDUCTIONS = {
    "sum": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "and": "BAND",
    "or": "BOR",
    "xor": "BXOR",
}


class Mpi:
    """An implementation that uses MPI_COMM_WORLD through mpi4py.

    The rank of a process in MPI_COMM_WORLD must equal its rank in the job.
    """

    def __init__(self, name: str, rank: int, ranks: int) -> None:
        self.name = name
        self._mpi = _import_mpi()
        self._world = self._mpi.COMM_WORLD
        found = self._world.Get_rank(), self._world.Get_size()
        if found != (rank, ranks):
            raise BenchError(
                f"--backend mpi: rank {rank} of {ranks} has MPI rank {found[0]} of {found[1]}, because the ranks "
                "were not started by the MPI library that mpi4py has loaded; start the ranks with the mpiexec of "
                "that library, or omit --backend mpi"
            )

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate ordinary memory."""
        return torch.empty(count, dtype=dtype)

    def call(self, operation: Operation, reduction: str, input: Tensor, output: Tensor) -> Callable[[], Any]:
        """Return a function that makes the blocking MPI call for `operation`."""
        return self._function("", operation, reduction, input, output)

    def begin(
        self, operation: Operation, reduction: str, input: Tensor, output: Tensor
    ) -> Callable[[], Wait]:
        """Return a function that starts a non-blocking call, such as Iallreduce, and returns its `Wait` method."""
        call = self._function("I", operation, reduction, input, output)
        return lambda: call().Wait

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Send `tensor` to `peer` with the blocking `Send`."""
        self._world.Send(_bytes(tensor), peer)

    def receive(self, tensor: Tensor, peer: int) -> Any:
        """Receive `tensor` from `peer` with the blocking `Recv`."""
        self._world.Recv(_bytes(tensor), peer)

    def begin_send(self, tensor: Tensor, peer: int) -> Wait:
        """Start a non-blocking send with `Isend`, and return the `Wait` method of its request."""
        wait: Wait = self._world.Isend(_bytes(tensor), peer).Wait
        return wait

    def begin_receive(self, tensor: Tensor, peer: int) -> Wait:
        """Start a non-blocking receive with `Irecv`, and return the `Wait` method of its request."""
        wait: Wait = self._world.Irecv(_bytes(tensor), peer).Wait
        return wait

    def _function(
        self, prefix: str, operation: Operation, reduction: str, input: Tensor, output: Tensor
    ) -> Callable[[], Any]:
        is_root = self._world.Get_rank() == ROOT

        def function(name: str, *arguments: Any) -> Callable[[], Any]:
            return partial(getattr(self._world, prefix + (name.lower() if prefix else name)), *arguments)

        if operation.name == "barrier":
            return function("Barrier")
        if operation.reduces:
            op, values = getattr(self._mpi, _REDUCTIONS[reduction]), input.numpy()
            if operation.name == "all_reduce":
                return function("Allreduce", self._mpi.IN_PLACE, values, op)
            if operation.name == "reduce":
                there = (self._mpi.IN_PLACE, values) if is_root else (values, None)
                return function("Reduce", *there, op, ROOT)
            return function("Reduce_scatter_block", values, output.numpy(), op)
        given, taken = _bytes(input), _bytes(output)
        return {
            "all_gather": partial(function, "Allgather", given, taken),
            "broadcast": partial(function, "Bcast", given, ROOT),
            "all_to_all": partial(function, "Alltoall", given, taken),
            "gather": partial(function, "Gather", given, taken if is_root else None, ROOT),
            "scatter": partial(function, "Scatter", given if is_root else None, taken, ROOT),
        }[operation.name]()


def reduces(reduction: str) -> bool:
    """Return whether MPI supports `reduction`; for example, MPI has no "avg"."""
    return reduction in _REDUCTIONS


def _bytes(tensor: Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()


def _import_mpi() -> Any:
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:  # otherwise MPI is initialized already
        mpi4py.rc.thread_level = "serialized"  # the fastest level that allows threads
    from mpi4py import MPI

    return MPI
