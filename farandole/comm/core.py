"""The interface between a communicator and its implementations.

| implementation | ranks | file |
| --- | --- | --- |
| `NativeCore` | on one host, over shared memory | `native_core.py` |
| `HierarchicalCore` | on several hosts: shared memory inside a host, messages between hosts | `hierarchical/core.py` |
| `MpiCore` | of an MPI communicator | `mpi/core.py` |
| `TorchCore` | of any `torch.distributed` process group: Gloo where the C core is missing, NCCL | `fallback.py` |
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
    """The operations of one group of ranks, on dense tensors.

    Every method blocks until this rank's part is complete.  The methods of an implementation with `returns_work` return
    a pending `torch.distributed.Work` instead.  Reductions are indices into `dtypes.REDUCTION_NAMES`, and reduced
    tensors are real.  The last argument, `flags`, holds flags of `farandole.native`.  The caller runs one collective at
    a time and has validated the arguments (`operations.py`).
    """

    name: str
    rank: int
    size: int
    returns_work: bool
    completes_at_exit: bool  # whether pending calls can still complete at program exit

    def supports(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the implementation supports the devices and layouts of these tensors."""

    def prepare(self, operation: str, *arguments: Any) -> Callable[[int], Any]:
        """Return a reusable call of an operation that takes only the flags.

        The caller passes a result other than None or 0 to `check`.
        """

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return the algorithm of an operation on `nbytes` bytes per rank, as text for users."""

    def check(self, status: Any) -> None:
        """Raise the error for a result of a call returned by `prepare`."""

    # ---- collectives ----

    def all_reduce(self, output: Tensor, input: Tensor, reduction: int, flags: int) -> Any:
        """Reduce `input` over all ranks into `output`, which may be `input` itself."""

    def reduce(self, output: Tensor | None, input: Tensor, reduction: int, root: int, flags: int) -> Any:
        """Reduce `input` into `output` of rank `root`, which may be its `input`; `output` is None on other ranks."""

    def reduce_scatter(self, output: Tensor, inputs: Parts, reduction: int, flags: int) -> Any:
        """Reduce `inputs` and keep this rank's part; parts of different ranks may differ in length."""

    def all_gather(self, outputs: Parts, input: Tensor, flags: int) -> Any:
        """Collect every rank's `input` in `outputs`; inputs of different ranks may differ in length."""

    def broadcast(self, output: Tensor | None, input: Tensor | None, root: int, flags: int) -> Any:
        """Copy `input` of rank `root` to `output` of the other ranks; the unused argument of a rank is None."""

    def gather(
        self, outputs: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int] | None, flags: int
    ) -> Any:
        """Collect every rank's `input` in `outputs` of rank `root`, `counts[r]` elements from rank r.

        Without `counts` all lengths are equal.
        """

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor], root: int, counts: Sequence[int] | None, flags: int
    ) -> Any:
        """Send `inputs[r]` of rank `root`, with `counts[r]` elements, to rank r; without `counts` lengths are equal."""

    def all_to_all(self, outputs: Parts, inputs: Parts, flags: int) -> Any:
        """Send input j to rank j and receive output i from rank i."""

    def scan(self, output: Tensor, input: Tensor, reduction: int, exclusive: bool, flags: int) -> Any:
        """Reduce the inputs of ranks 0 to `rank`, or to `rank - 1` if `exclusive` (rank 0 keeps its output)."""

    def barrier(self, flags: int) -> Any:
        """Wait until every rank has called it."""

    # ---- point-to-point ----

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to send."""

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to receive; `peer` -1 receives from any rank."""

    # ---- memory ----

    @property
    def shares_memory(self) -> bool:
        """Whether `allocate_common` is supported."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return a tensor in the memory with the fastest operations; a collective call."""

    def allocate_common(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return one tensor that all ranks share; a collective call."""

    # ---- state and shutdown ----

    def subgroup(self, members: Sequence[int]) -> Core | None:
        """Return an implementation among `members`, called by these ranks; None if torch must create the group."""

    @property
    def closed(self) -> bool:
        """Whether the group was destroyed."""

    def whereabouts(self) -> str:
        """Describe the current call and the ranks for which it waits."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call waits for the other ranks."""

    def within(self, timeout_s: float, call: Call) -> Call:
        """Return a call with its own timeout, in seconds."""

    def leave(self, note: str) -> None:
        """Notify the other ranks that this rank makes no further call."""

    def give_up(self) -> None:
        """Make the pending calls of this process fail."""

    def rest(self, patience_s: float) -> bool:
        """Complete or cancel pending messages; return whether none is pending after `patience_s`."""

    def close(self) -> None:
        """Release the resources; no call may be pending."""


class GroupCore:
    """The base class of all implementations over a `HostGroup` or an `MpiGroup`."""

    name = "farandole"
    returns_work = False
    completes_at_exit = False
    shares_memory = False
    takes_devices = False
    """Whether CUDA tensors are supported, through copies on the host."""
    form_subgroup: Callable[[Sequence[int]], Any]
    """Set by `backend.form`."""

    def __init__(self, host: HostGroup) -> None:
        self.host = host
        self.rank = host.group_rank
        self.size = len(host.membership.ranks)
        self.messages = Messages(host)
        self.check = host.check
        self.within = host.within
        self.set_timeout = host.set_timeout
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
        """Return "shared memory": there is no choice of algorithms."""
        return "shared memory"

    def prepare(self, operation: str, *arguments: Any) -> Callable[[int], Any]:
        """Return a reusable call of an operation that takes only the flags."""
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
        """Compare a call with the calls of the other ranks before a torch process group serves the call.

        Groups over MPI do not compare calls.
        """

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to send."""
        return self.messages.post(tensor, peer, tag, sends=True)

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to receive; `peer` -1 receives from any rank."""
        return self.messages.post(tensor, peer, tag, sends=False)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return a tensor in memory that the ranks of this host share."""
        return self.host.allocate(shape, dtype, flags)

    def allocate_common(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Raise CommunicationError: the ranks do not share memory."""
        raise CommunicationError("the ranks of this group do not share memory; use `empty` instead")

    def subgroup(self, members: Sequence[int]) -> Core | None:
        """Return an implementation among `members` over the same endpoint."""
        core: Core = self.form_subgroup(members)
        return core

    def invalidate(self, reason: str) -> None:
        """Drop the group in a forked child, whose handle belongs to the parent."""
        self.host.handle = None
        self.messages.invalidate(reason)

    def rest(self, patience_s: float) -> bool:
        """Complete or withdraw messages under way; return whether none is left after `patience_s`."""
        return self.messages.close(patience_s)
