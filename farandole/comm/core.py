"""What communicates: the interface between a communicator and its implementations.

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

    Every method blocks until this rank's part is complete; `returns_work` marks an implementation whose methods
    return a `torch.distributed.Work` under way instead.  Reductions are numbers of `dtypes.REDUCTION_NAMES`, and
    reduced tensors are real.  The last argument, `flags`, holds those of `farandole.native`.  The caller runs one
    collective at a time and has validated the arguments (`operations.py`).
    """

    name: str
    rank: int
    size: int
    returns_work: bool
    completes_at_exit: bool  # when the program ends, the other ranks still complete calls under way

    def supports(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors of these devices and layouts can be communicated."""

    def prepare(self, operation: str, *arguments: Any) -> Callable[[int], Any]:
        """Return a call of an operation, with all arguments but the flags, that may be made many times.

        A result other than None or 0 is for `check`.
        """

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return how an operation on `nbytes` bytes per rank is done, as text for users."""

    def check(self, status: Any) -> None:
        """Raise the error that a result of `prepare`'s call stands for."""

    # ---- collectives ----

    def all_reduce(self, output: Tensor, input: Tensor, reduction: int, flags: int) -> Any:
        """Reduce `input` over all ranks into `output`, which may be `input` itself."""

    def reduce(self, output: Tensor | None, input: Tensor, reduction: int, root: int, flags: int) -> Any:
        """Reduce `input` into `output` of rank `root`, which may be its `input`; None elsewhere."""

    def reduce_scatter(self, output: Tensor, inputs: Parts, reduction: int, flags: int) -> Any:
        """Reduce `inputs` and keep this rank's part; parts of different ranks may differ in length."""

    def all_gather(self, outputs: Parts, input: Tensor, flags: int) -> Any:
        """Collect every rank's `input` in `outputs`; inputs of different ranks may differ in length."""

    def broadcast(self, output: Tensor | None, input: Tensor | None, root: int, flags: int) -> Any:
        """Copy `input` of rank `root` (None elsewhere) to `output` of the others (None on the root)."""

    def gather(
        self, outputs: Sequence[Tensor], input: Tensor, root: int, counts: Sequence[int] | None, flags: int
    ) -> Any:
        """Collect every rank's `input` in `outputs` of rank `root`, `counts[r]` elements from rank r.

        Without `counts` all lengths are equal.
        """

    def scatter(
        self, output: Tensor, inputs: Sequence[Tensor], root: int, counts: Sequence[int] | None, flags: int
    ) -> Any:
        """Give rank r the tensor `inputs[r]` of rank `root`, of `counts[r]` elements (all equal without)."""

    def all_to_all(self, outputs: Parts, inputs: Parts, flags: int) -> Any:
        """Send input j to rank j and receive output i from rank i."""

    def scan(self, output: Tensor, input: Tensor, reduction: int, exclusive: bool, flags: int) -> Any:
        """Reduce the inputs of ranks 0 to this one; with `exclusive` without this one, on rank 0 unchanged."""

    def barrier(self, flags: int) -> Any:
        """Wait until every rank has called it."""

    # ---- point-to-point ----

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send."""

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive; `peer` -1 receives from any rank."""

    # ---- memory ----

    @property
    def shares_memory(self) -> bool:
        """Whether `allocate_common` has memory."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return a tensor in memory that makes operations fastest; a collective call."""

    def allocate_common(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return one tensor for all ranks; a collective call."""

    # ---- life ----

    def subgroup(self, members: Sequence[int]) -> Core | None:
        """Return an implementation among some ranks, in this order, called by them; None where torch must make it."""

    @property
    def closed(self) -> bool:
        """Whether the group was destroyed."""

    def whereabouts(self) -> str:
        """Describe the call under way and the ranks that it waits for."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call waits for the other ranks."""

    def within(self, timeout_s: float, call: Call) -> Call:
        """Return a call with a timeout of its own."""

    def leave(self, note: str) -> None:
        """Tell the other ranks that this one makes no further call."""

    def give_up(self) -> None:
        """Make this process's calls under way return, with an error."""

    def rest(self, patience_s: float) -> bool:
        """Complete or withdraw messages under way; return whether none is left after `patience_s`."""

    def close(self) -> None:
        """Release the resources; no call may be under way."""


class GroupCore:
    """The parts that all implementations over a `HostGroup` (or an `MpiGroup`) share."""

    name = "farandole"
    returns_work = False
    completes_at_exit = False
    shares_memory = False
    takes_devices = False
    """Whether CUDA tensors are communicated too, through copies on the host."""
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
        """Return whether all tensors are strided, and on the CPU unless the group takes those of devices."""
        if all(tensor.is_cpu and tensor.layout is torch.strided for tensor in tensors):
            return True
        return self.takes_devices and staged(tensors)

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return what the ranks communicate through, where there is no choice of algorithms."""
        return "shared memory"

    def prepare(self, operation: str, *arguments: Any) -> Callable[[int], Any]:
        """Return a call of an operation with all arguments but the flags."""
        method = partial(getattr(self, operation), *arguments)

        def call(flags: int) -> None:
            with torch.no_grad():
                method(flags)

        return call

    def scan(self, output: Tensor, input: Tensor, reduction: int, exclusive: bool, flags: int) -> None:
        """Reduce the inputs of ranks 0 to this one (without this one if `exclusive`)."""
        rows = input.new_empty(self.size, input.numel())
        cast(Core, self).all_gather([rows], input, flags)
        last = self.rank - exclusive
        if last >= 0:
            output.copy_(reduce_rows(rows[: last + 1], reduction).view(output.shape))

    def agree(self, call: CallRecord, flags: int) -> None:
        """Compare a call with those of the other ranks before a torch process group serves it.

        Groups over MPI do not compare calls.
        """

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send."""
        return self.messages.post(tensor, peer, tag, sends=True)

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive; `peer` -1 receives from any rank."""
        return self.messages.post(tensor, peer, tag, sends=False)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Return a tensor that the ranks of this host can reach."""
        return self.host.allocate(shape, dtype, flags)

    def allocate_common(self, shape: Sequence[int], dtype: torch.dtype, flags: int) -> Tensor:
        """Raise: ranks that do not share memory have no common tensor."""
        raise CommunicationError("the ranks of this group do not share memory; use `empty` instead")

    def subgroup(self, members: Sequence[int]) -> Core | None:
        """Form a group of some of the ranks over the same endpoint."""
        core: Core = self.form_subgroup(members)
        return core

    def invalidate(self, reason: str) -> None:
        """Forget the group in a forked child, whose handle is the parent's."""
        self.host.handle = None
        self.messages.invalidate(reason)

    def rest(self, patience_s: float) -> bool:
        """Complete or withdraw messages under way; return whether none is left after `patience_s`."""
        return self.messages.close(patience_s)
