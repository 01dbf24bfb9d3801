"""The interface between a communicator and its implementations.

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
"""One tensor per rank, or a single tensor that holds equal parts for all ranks."""


class Core(Protocol):
    """The interface of implementations: operations on dense tensors within one group of ranks.

    Every method blocks until this rank's part is complete, or returns a pending `torch.distributed.Work` if
    `returns_work` is set.  Reductions are indices into `dtypes.REDUCTION_NAMES`, and reduced tensors are real.  The
    last argument, `flags`, is a combination of `farandole.native` flags.  The caller runs one collective at a time and
    validates the arguments (`operations.py`).
    """

    name: str
    rank: int
    size: int
    returns_work: bool
    completes_at_exit: bool  # whether pending calls can complete during program exit

    def supports(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the implementation supports the tensors' devices and layouts."""

    def prepare(self, operation: str, *arguments: Any) -> Callable[[int], Any]:
        """Return a callable that runs the operation again at each call; its argument is `flags`.

        The caller passes results other than None and 0 to `check`.
        """

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return the name of the algorithm for an operation on `nbytes` bytes per rank, as shown to users."""

    def check(self, status: Any) -> None:
        """Raise the exception for `status`, the result of a callable that `prepare` returned.

        Do nothing if the call succeeded; wait first if the result is pending work.
        """

    # ---- collectives ----

    def all_reduce(self, output: Tensor, input: Tensor, reduction: int, flags: int) -> Any:
        """Reduce `input` over all ranks into `output`, which may be `input` itself."""

    def reduce(self, output: Tensor | None, input: Tensor, reduction: int, root: int, flags: int) -> Any:
        """Reduce `input` over all ranks into `output` on rank `root`; `output` is None on other ranks.

        On the root, `output` may be `input` itself.
        """

    def reduce_scatter(self, output: Tensor, inputs: Parts, reduction: int, flags: int) -> Any:
        """Reduce `inputs` over all ranks and store this rank's part in `output`; part lengths may differ."""

    def all_gather(self, outputs: Parts, input: Tensor, flags: int) -> Any:
        """Gather every rank's `input` into `outputs`; lengths may differ between ranks."""

    def broadcast(self, output: Tensor | None, input: Tensor | None, root: int, flags: int) -> Any:
        """Copy `input` from rank `root` to `output` on the other ranks; the unused argument is None."""

    def gather(
        self, outputs: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int] | None, flags: int
    ) -> Any:
        """Gather every rank's `input` into `outputs` on rank `root`, with `counts[r]` elements from rank r.

        If `counts` is None, all lengths are equal.
        """

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor], root: int, counts: Sequence[int] | None, flags: int
    ) -> Any:
        """Send `inputs[r]`, with `counts[r]` elements, from rank `root` to rank r.

        If `counts` is None, all lengths are equal.
        """

    def all_to_all(self, outputs: Parts, inputs: Parts, flags: int) -> Any:
        """Send input j to rank j and receive output i from rank i."""

    def scan(self, output: Tensor, input: Tensor, reduction: int, exclusive: bool, flags: int) -> Any:
        """Reduce the inputs of ranks 0 to `rank`, or to `rank - 1` if `exclusive` (rank 0 keeps its output)."""

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
        """Whether `allocate_shared` is supported."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return a tensor in the memory in which operations are fastest.  This is a collective call."""

    def receive_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor that other ranks write directly, if possible.  This is a local call."""

    def allocate_shared(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return a tensor whose memory all ranks share.  This is a collective call."""

    # ---- state and shutdown ----

    def subgroup(self, members: Sequence[int]) -> Core | None:
        """Return an implementation for `members`, or None if torch must create the group.

        Only these ranks call this method.
        """

    @property
    def closed(self) -> bool:
        """Whether the group was destroyed."""

    def whereabouts(self) -> str:
        """Describe the current call and the ranks that it is waiting for."""

    def set_roles(self, roles: Sequence[str]) -> None:
        """Set the role of each rank, such as `stage 3`; errors and warnings of this process then show the role, as in `rank 3 (process 4711, stage 3)`."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may wait for other ranks."""

    def within(self, timeout_s: float, call: Call) -> Call:
        """Return `call` with a separate timeout, in seconds."""

    def leave(self, note: str) -> None:
        """Notify the other ranks that this rank will make no further calls."""

    def give_up(self) -> None:
        """Fail the pending calls of this process."""

    def rest(self, patience_s: float) -> bool:
        """Complete or cancel pending messages; return whether all are complete within `patience_s` seconds."""

    def close(self) -> None:
        """Release all resources; no call may be pending."""


class GroupCore:
    """The base class of implementations over a `HostGroup` or an `MpiGroup`."""

    name = "farandole"
    returns_work = False
    completes_at_exit = False
    shares_memory = False
    takes_devices = False
    """Whether CUDA tensors are supported by copying them to the host."""
    form_subgroup: Callable[[Sequence[int]], Any]
    """Creates subgroups; set by `backend.form`."""

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
        """Whether the group was destroyed."""
        return self.host.handle is None

    def supports(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all tensors are strided and on a supported device."""
        if all(tensor.is_cpu and tensor.layout is torch.strided for tensor in tensors):
            return True
        return self.takes_devices and staged(tensors)

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return "shared memory", the only algorithm within a host."""
        return "shared memory"

    def prepare(self, operation: str, *arguments: Any) -> Callable[[int], Any]:
        """Return a callable that runs the operation again at each call; its argument is `flags`."""
        method = partial(getattr(self, operation), *arguments)

        def call(flags: int) -> None:
            with torch.no_grad():
                method(flags)

        return call

    def scan(self, output: Tensor, input: Tensor, reduction: int, exclusive: bool, flags: int) -> None:
        """Reduce the inputs of ranks 0 to `rank`, or to `rank - 1` if `exclusive`."""
        rows = input.new_empty(self.size, input.numel())
        cast(Core, self).all_gather([rows], input, flags)
        last = self.rank - exclusive
        if last >= 0:
            output.copy_(reduce_rows(rows[: last + 1], reduction).view(output.shape))

    def agree(self, call: CallRecord, flags: int) -> None:
        """Check that all ranks make the same call before a torch process group runs the call.

        This default implementation, which MPI groups use, checks nothing.
        """

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start sending `tensor` to rank `peer`."""
        return self.messages.post(tensor, peer, tag, sends=True)

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start receiving into `tensor` from rank `peer`, or from any rank if `peer` is -1."""
        return self.messages.post(tensor, peer, tag, sends=False)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return a tensor in memory shared by the ranks of this host."""
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
        """Return an implementation for `members` over the same endpoint."""
        core: Core = self.form_subgroup(members)
        return core

    def invalidate(self, reason: str) -> None:
        """Invalidate the group in a forked child, because its handle belongs to the parent."""
        self.host.handle = None
        self.messages.invalidate(reason)

    def rest(self, patience_s: float) -> bool:
        """Complete or cancel pending messages; return whether all are complete within `patience_s` seconds."""
        return self.messages.close(patience_s)
