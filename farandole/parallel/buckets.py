"""Gradients of several parameters in one flat buffer, so that one collective reduces them all.

A bucket's buffer comes from `Communicator.empty`: where ranks share memory it is reduced in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.comm.communicator import Communicator
from farandole.comm.compression import Compression
from farandole.comm.compression.call import check

_ALIGNMENT = 16
"""Elements.  Every gradient starts on a cache line, so that kernels treat it like a tensor of its own."""


class GradientBucket:
    """One flat buffer: the gradients of `parameters` in order, then one flag for each.

    A flag says whether the parameter received a gradient; reduced with the rest, it tells every rank
    whether any rank's did.  With a `compression` the gradients are compressed between hosts; the flags are not.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], comm: Communicator, compression: Compression | None = None
    ) -> None:
        self.parameters = list(parameters)
        self._comm = comm
        starts, end = [], 0
        for parameter in self.parameters:
            starts.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        first = self.parameters[0]
        self._buffer = comm.empty(end + len(self.parameters), dtype=first.dtype, device=first.device).zero_()
        self.gradients = self._buffer[:end]
        self._flags = self._buffer[end:]
        self._views = [
            self.gradients[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(starts, self.parameters, strict=True)
        ]
        self.compressor = None
        if compression is not None and not isinstance(compression, Compression):
            raise TypeError(
                f"compression={compression!r}: a Compression (Cast, Int8, TopK, PowerSGD), or None"
            )
        if compression is not None:
            check(comm.group, first)
            shapes = [(start, p.shape) for start, p in zip(starts, self.parameters, strict=True)]
            self.compressor = compression.for_tensor(self._buffer.numel(), shapes, exact=len(starts))
        self._received: list[bool] = []
        self._awaited: set[int] = set()
        self._work: dist.Work | None = None
        self.launched = False
        self.clear()

    def clear(self) -> None:
        """Forget the gradients: the next ones are the first of a new step."""
        self._received = [False] * len(self.parameters)
        self._awaited = set(range(len(self.parameters)))
        self.launched = False
        for parameter in self.parameters:
            parameter.grad = None

    def receive(self, index: int) -> None:
        """Take over the gradient that parameter `index` has just accumulated."""
        parameter, view = self.parameters[index], self._views[index]
        if self.launched:
            raise RuntimeError(
                "a gradient arrived after its bucket was reduced: run every backward pass of a step but "
                "the last under no_sync()"
            )
        if parameter.grad is not view:  # the first of this step; later ones accumulate in the view itself
            assert parameter.grad is not None  # the hook runs because there is one
            view.copy_(parameter.grad)
            parameter.grad = view
        self._received[index] = True

    def complete(self, index: int) -> bool:
        """Note that parameter `index` expects nothing more this step; true when that holds for all."""
        self._awaited.discard(index)
        return self.full

    @property
    def full(self) -> bool:
        """Whether no parameter expects anything more this step."""
        return not self._awaited

    def launch(self) -> None:
        """Start to average the bucket over all ranks; it must not be touched until `finish`."""
        for view, received in zip(self._views, self._received, strict=True):
            if not received:
                view.zero_()
        self._flags.copy_(torch.tensor(self._received))
        if self._comm.size > 1:
            self._work = self._comm.all_reduce(
                self._buffer, "avg", compression=self.compressor, async_op=True
            )
        self.launched = True

    def finish(self) -> None:
        """Wait for the reduction, and give every parameter that any rank used its gradient."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        used = self._flags.tolist()
        for parameter, view, share in zip(self.parameters, self._views, used, strict=True):
            parameter.grad = view if share > 0 else None


def make_buckets(
    parameters: Iterable[nn.Parameter],
    comm: Communicator,
    bucket_bytes: int,
    compression: Compression | None = None,
) -> list[GradientBucket]:
    """Fill buckets of about `bucket_bytes` in the order given, one type and device in each."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        members = open_buckets.setdefault(kind, [])
        members.append(parameter)
        if sum(member.nbytes for member in members) >= bucket_bytes:
            full.append(open_buckets.pop(kind))
    full += open_buckets.values()
    return [GradientBucket(members, comm, compression) for members in full]


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all elements of `tensors` together; infinite or NaN if any element is."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))
