"""Define requests for collective operations, and check that the requests of all ranks match.

A request asks the engine to run a named collective operation.  A `Signature` contains the properties that ranks
exchange and compare.  A `Request` also contains the name and this rank's tensors.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALLREDUCE = "allreduce"
ALLGATHER = "allgather"
BROADCAST = "broadcast"
ALLTOALL = "alltoall"
REDUCESCATTER = "reducescatter"
BARRIER = "barrier"
JOIN = "join"

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
"""The reduction operations, which are the values of `op`.  Average and Sum have the same values as in Horovod."""

OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")

UNNAMED = ".noname."
"""A substring of every generated request name.

A generated name is used only once, so the response cache does not store the name.
"""


class HorovodInternalError(RuntimeError):
    """Raised if an operation fails because ranks disagree, a rank died, or Horovod was shut down.

    `hvd.elastic.run` catches this error, restores the last commit and continues.
    """


class MismatchError(HorovodInternalError):
    """Raised if ranks submit different operations under the same name.

    `hvd.elastic.run` does not catch this error, because the error would recur after a restart.
    """


class Signature(NamedTuple):
    """The request properties that ranks compare.  A grouped operation has several shapes and dtypes."""

    kind: str
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    op: int = SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()


class Request:
    """A request from this rank.

    Args:
        name: The name of the operation.
        signature: The properties that ranks compare.
        inputs: The tensors to read.
        outputs: The tensors to write.  For an in-place operation, pass `inputs`.  If the sizes of the results depend on
            other ranks, pass an empty list; the engine later sets the attribute `outputs`.
    """

    __slots__ = (
        "_done",
        "error",
        "event",
        "inputs",
        "name",
        "outputs",
        "received_splits",
        "signature",
        "submitted",
    )

    def __init__(
        self, name: str, signature: Signature, inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor] = ()
    ) -> None:
        self.name = name
        self.signature = signature
        self.inputs = inputs
        self.outputs = outputs
        self.received_splits: list[int] = []
        self.error: BaseException | None = None
        self.event: Any = None  # a device event, recorded after the inputs
        self.submitted = time.monotonic()
        self._done = _thread.allocate_lock()  # held until the request finishes
        self._done.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the request as finished, and wake the waiting threads.  Pass `error` if the request failed."""
        self.error = error
        self._done.release()

    def finished(self) -> bool:
        """Return whether the request has a result or an error."""
        return not self._done.locked()

    def wait(self) -> None:
        """Block until the request finishes.  If the request failed, raise its error."""
        self._done.acquire()
        self._done.release()
        if self.error is not None:
            # an exception has only one traceback, so each waiting thread raises a new exception
            kind = type(self.error) if isinstance(self.error, HorovodInternalError) else HorovodInternalError
            raise kind(str(self.error)) from self.error


def disagreement(name: str, signatures: Sequence[Signature | None], ranks: Sequence[int]) -> str | None:
    """Return an error message if the ranks' signatures are incompatible, otherwise None.

    Args:
        name: The name of the request.
        signatures: One signature per member of the process set, or None for a member that has called `join`.
        ranks: The members' ranks in the world, in the order of `signatures`.
    """
    given = [(rank, found) for rank, found in zip(ranks, signatures, strict=True) if found is not None]
    first_rank, first = given[0]

    def differ(what: str, values: list[Any]) -> str | None:
        for (rank, _), value in zip(given, values, strict=True):
            if value != values[0]:
                return (
                    f"Mismatched {first.kind} {what} for tensor {name}: rank {first_rank} sent "
                    f"{_show(values[0])}, but rank {rank} sent {_show(value)}."
                )
        return None

    kinds = [found.kind for _, found in given]
    for (rank, _), kind in zip(given, kinds, strict=True):
        if kind != kinds[0]:
            return (
                f"Mismatched collective operations for tensor {name}: rank {first_rank} requested {_one(kinds[0])}, "
                f"but rank {rank} requested {_one(kind)}."
            )
    found = [signature for _, signature in given]
    problem = (
        differ("numbers of tensors in a group", [len(one.shapes) for one in found])
        or differ("data types", [one.dtypes for one in found])
        or differ("devices", [one.device for one in found])
        or differ("reduction operations", [OP_NAMES[one.op] for one in found])
        or differ("root ranks", [one.root for one in found])
        or differ("prescale factors", [one.prescale for one in found])
        or differ("postscale factors", [one.postscale for one in found])
    )
    if problem:
        return problem
    if first.kind in (ALLGATHER, ALLTOALL):
        return differ(
            "tensor shapes (beyond the first dimension)",
            [tuple(torch.Size(shape[1:]) for shape in one.shapes) for one in found],
        ) or differ("numbers of dimensions", [tuple(len(shape) for shape in one.shapes) for one in found])
    return differ("tensor shapes", [one.shapes for one in found])


def _one(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _show(value: Any) -> str:
    """Format a value for an error message."""
    if isinstance(value, torch.Size):
        return str(list(value))
    if isinstance(value, tuple):
        if len(value) == 1:
            return _show(value[0])
        return "[" + ", ".join(_show(item) for item in value) + "]"
    return str(value)
