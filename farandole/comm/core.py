"""`Core`, the interface between a communicator and the implementations of its operations.

| implementation | group | file |
| --- | --- | --- |
| `NativeCore` | ranks on one host, over shared memory | `native_core.py` |
| `HierarchicalCore` | ranks on several hosts, over shared memory and messages | `hierarchical/core.py` |
| `MpiCore` | an MPI communicator | `mpi/core.py` |
| `TorchCore` | any torch process group, such as NCCL, or Gloo if the C core is missing | `fallback.py` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.accelerators import staged
from farandole.comm.errors import CommunicationError
from farandole.comm.host_group import HostGroup
from farandole.comm.messages import Messages
from farandole.comm.reduce_rows import reduce_rows
from farandole.comm.work import Call
from farandole.native import Call as CallRecord

Parts = Sequence[Tensor]
"""A sequence with one tensor per rank, or with a single tensor that consists of equal parts for all ranks."""


class Core(Protocol):
    """The interface of all implementations: operations on dense tensors within one group of ranks.

    If `returns_work` is False, each collective blocks until it is complete on this rank.  If `returns_work` is True,
    each collective returns a pending `torch.distributed.Work`.

    The argument `reduction` is an index into `dtypes.REDUCTION_NAMES`, and `flags` is a combination of flags of
    `farandole.native`.  Tensors that are reduced have real dtypes.  The caller runs one collective at a time, and
    validates the arguments (`operations.py`).
    """

    name: str
    rank: int
    size: int
    returns_work: bool
    completes_at_exit: bool  # whether pending calls can complete during program exit

    def supports(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether this implementation supports the devices and the layouts of all `tensors`."""

    def prepare(self, operation: str, *arguments: Any) -> Callable[[int], Any]:
        """Return a reusable function that runs `operation` with `arguments`.

        Args:
            operation: The name of a method of this class.
            arguments: The arguments of the method, except `flags`, which is the argument of the returned function.

        If the function returns a result other than None or 0, the caller must pass the result to `check`.
        """

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return the name of the algorithm for `operation` on `nbytes` bytes per rank; see `Communicator.algorithm`."""

    def check(self, status: Any) -> None:
        """Raise an exception if `status`, returned by a prepared function, indicates a failure.

        If `status` is pending work, first wait for its completion.
        """

    # ---- collectives ----

    def all_reduce(self, output: Tensor, input: Tensor, reduction: int, flags: int) -> Any:
        """Reduce `input` over all ranks into `output`, which may be `input` itself."""

    def reduce(self, output: Tensor | None, input: Tensor, reduction: int, root: int, flags: int) -> Any:
        """Reduce `input` over all ranks into `output` on rank `root`; `output` is None on other ranks.

        On the root, `output` may be `input` itself.
        """

    def reduce_scatter(self, output: Tensor, inputs: Parts, reduction: int, flags: int) -> Any:
        """Reduce `inputs` over all ranks, and store this rank's part of the result in `output`.

        The parts may have different lengths.
        """

    def all_gather(self, outputs: Parts, input: Tensor, flags: int) -> Any:
        """Gather the `input` of every rank into `outputs`; the inputs may have different lengths."""

    def broadcast(self, output: Tensor | None, input: Tensor | None, root: int, flags: int) -> Any:
        """Copy `input` on rank `root` to `output` on all other ranks.

        `output` is None on rank `root`, and `input` is None on the other ranks.
        """

    def gather(
        self, outputs: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int] | None, flags: int
    ) -> Any:
        """Gather the `input` of every rank into `outputs` on rank `root`.

        `counts[r]` is the number of elements on rank r.  If `counts` is None, all ranks have the same number.
        """

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor], root: int, counts: Sequence[int] | None, flags: int
    ) -> Any:
        """Copy `inputs[r]` on rank `root` to `output` on rank r, for every rank r.

        `counts[r]` is the number of elements on rank r.  If `counts` is None, all ranks have the same number.
        """

    def all_to_all(self, outputs: Parts, inputs: Parts, flags: int) -> Any:
        """Send part j of `inputs` to rank j, and receive part i of `outputs` from rank i."""

    def scan(self, output: Tensor, input: Tensor, reduction: int, exclusive: bool, flags: int) -> Any:
        """Reduce the inputs of all ranks up to and including this rank into `output`.

        If `exclusive` is True, the input of this rank is excluded, and `output` on rank 0 is unchanged.
        """

    def barrier(self, flags: int) -> Any:
        """Block until every rank has called this method."""

    # ---- point-to-point ----

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start sending `tensor` to rank `peer`."""

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start receiving into `tensor` from rank `peer`, or from any rank if `peer` is -1."""

    # ---- memory ----

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks can share memory, so that `allocate_shared` is supported."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return an uninitialized tensor in the memory that makes operations fastest, such as shared memory.

        This is a collective call.
        """

    def receive_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor into which, if possible, other ranks can write directly.

        This is not a collective call.
        """

    def allocate_shared(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return one tensor that all ranks share.  This is a collective call."""

    # ---- state and shutdown ----

    def subgroup(self, members: Sequence[int]) -> Core | None:
        """Create a group of the ranks `members`, and return its implementation.

        Exactly these ranks must call this method.  The result is None if torch must create the group.
        """

    @property
    def closed(self) -> bool:
        """Whether the group has been destroyed."""

    def whereabouts(self) -> str:
        """Return the current call and the ranks for which the call waits, as text for an error message."""

    def set_roles(self, roles: Sequence[str]) -> None:
        """Set the role that error messages and warnings of this process show for each rank.

        For example, if the role of rank 3 is `stage 3`, messages contain `rank 3 (process 4711, stage 3)`.
        """

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may wait for other ranks."""

    def within(self, timeout_s: float, call: Call) -> Call:
        """Return a function that runs `call` with a timeout of `timeout_s` seconds instead of the group's timeout."""

    def leave(self, note: str) -> None:
        """Notify the other ranks that this rank will make no further calls; `note` is the reason."""

    def give_up(self) -> None:
        """Make the pending calls of this process fail."""

    def rest(self, patience_s: float) -> bool:
        """Complete pending sends and cancel pending receives, within `patience_s` seconds.

        Returns:
            True if no message is pending at the end.
        """

    def close(self) -> None:
        """Release all resources of the group.  The caller must ensure that no call is pending."""


class GroupCore:
    """The base class of the implementations that use a `HostGroup` or an `MpiGroup`."""

    name = "farandole"
    returns_work = False
    completes_at_exit = False
    shares_memory = False
    takes_devices = False
    """Whether this group supports CUDA tensors, which it copies to the host."""
    form_subgroup: Callable[[Sequence[int]], Any]
    """A function that creates a subgroup of the given ranks; `backend.groups.form` sets it."""

    def __init__(self, host: HostGroup) -> None:
        self.host = host
        self.rank = host.group_rank
        self.size = len(host.membership.ranks)
        self.messages = Messages(host)
        self.check = host.check
        self.within = host.within
        self.set_timeout = host.set_timeout
        self.set_roles = host.membership.set_roles
        self.whereabouts = host.whereabouts
        self.leave, self.give_up, self.close = host.leave, host.give_up, host.close

    @property
    def closed(self) -> bool:
        """Whether the group has been destroyed."""
        return self.host.handle is None

    def supports(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all tensors are strided and on a supported device.

        If `tensors` include CUDA tensors, first wait for the kernels that compute these tensors.
        """
        if all(tensor.is_cpu and tensor.layout is torch.strided for tensor in tensors):
            return True
        return self.takes_devices and staged(tensors)

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return "shared memory", the only algorithm within a host."""
        return "shared memory"

    def prepare(self, operation: str, *arguments: Any) -> Callable[[int], Any]:
        """Return a function of `flags` that runs the method `operation` with `arguments`; see `Core.prepare`."""
        method = partial(getattr(self, operation), *arguments)

        def call(flags: int) -> None:
            with torch.no_grad():
                method(flags)

        return call

    def scan(self, output: Tensor, input: Tensor, reduction: int, exclusive: bool, flags: int) -> None:
        """Gather all inputs, and reduce the inputs of the ranks up to this rank; see `Core.scan`."""
        rows = input.new_empty(self.size, input.numel())
        cast(Core, self).all_gather([rows], input, flags)
        last = self.rank - exclusive
        if last >= 0:
            output.copy_(reduce_rows(rows[: last + 1], reduction).view(output.shape))

    def agree(self, call: CallRecord, flags: int) -> None:
        """Check that all ranks make the same call, before an inner torch process group runs the call.

        This implementation, which MPI groups use, checks nothing.
        """

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start sending `tensor` to rank `peer`."""
        return self.messages.post(tensor, peer, tag, sends=True)

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start receiving into `tensor` from rank `peer`, or from any rank if `peer` is -1."""
        return self.messages.post(tensor, peer, tag, sends=False)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return an uninitialized tensor in memory that the ranks of this host share.  This is a collective call."""
        return self.host.allocate(shape, dtype, flags)

    def receive_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in private memory."""
        return torch.empty(*shape, dtype=dtype, device="cpu")

    def allocate_shared(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Raise CommunicationError, because the ranks do not share memory."""
        raise CommunicationError(
            "cannot allocate a shared tensor: the ranks of this group do not share memory; use `empty` instead"
        )

    def subgroup(self, members: Sequence[int]) -> Core | None:
        """Create a group of the ranks `members` with `form_subgroup`; see `Core.subgroup`."""
        core: Core = self.form_subgroup(members)
        return core

    def invalidate(self, reason: str) -> None:
        """Make later calls in a forked child process fail with the error text `reason`."""
        self.host.handle = None  # the handle belongs to the parent process
        self.messages.invalidate(reason)

    def rest(self, patience_s: float) -> bool:
        """Complete pending sends and cancel pending receives; see `Core.rest`."""
        return self.messages.close(patience_s)
