"""Communicators, which run collectives and point-to-point messages within a group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm import objects
from farandole.comm import operations as table
from farandole.comm.arrays import Array, read, read_list, written, written_list
from farandole.comm.batch import Batch
from farandole.comm.compression.base import Compression, Compressor
from farandole.comm.compression.call import compressed_all_reduce
from farandole.comm.dispatcher import Dispatcher, PersistentOperation
from farandole.comm.fallback import TorchCore, has_nccl, local_group
from farandole.comm.operations import existing_rank, reduction_number

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

ReduceName = Literal["sum", "avg", "product", "min", "max", "and", "or", "xor"]
__all__ = ["Array", "Batch", "Communicator", "PersistentOperation", "ReduceName"]


class Communicator:
    """Collectives and point-to-point messages within one group of ranks.

    All ranks must call the group's collectives in the same order.  By default, methods block until the result is
    ready.  With `async_op=True` they return a `torch.distributed.Work` immediately; do not modify the tensors before
    `Work.wait()` has returned.  Every method also accepts NumPy arrays and writes results to them in place.

    The input and the output may share memory.  An operation runs in place if this rank's part of the input has the same
    address as this rank's part of the output.  If the input overlaps the output in any other way, the input is copied
    first.

        comm = farandole.init().comm
        gradients = comm.empty(1_000_000)          # shared memory: reduced in place, no copies
        comm.all_reduce(gradients, "avg")

    Each `*_init` method validates its arguments once and returns a `PersistentOperation`.  Each call to this object
    runs the operation again with the same tensors.

    Args:
        group: A process group of any backend.  If several communicators use the same `farandole` group, the order
            of all their calls must be the same on all ranks.
    """

    group: dist.ProcessGroup
    """The torch process group.

    A communicator without a torch process group, for example one from `from_mpi`, does not have this attribute.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ours: Communicator | None = getattr(group, "communicator", None)
        if ours is None:
            core = TorchCore(lambda: group, group.rank(), group.size(), group.name())
            self._bind(Dispatcher(core, core.name))
        else:
            self._bind(ours.dispatcher)
        self.group = group

    @classmethod
    def over(cls, dispatcher: Dispatcher) -> Communicator:
        """Return a communicator that runs its calls with `dispatcher` and has no torch process group."""
        comm = cls.__new__(cls)
        comm._bind(dispatcher)
        return comm

    @classmethod
    def from_mpi(cls, comm: Intracomm, timeout_s: float = 1800.0) -> Communicator:
        """Duplicate the mpi4py communicator `comm`, and return a communicator over the duplicate.

        This is a collective call.

        Args:
            comm: The mpi4py communicator.
            timeout_s: How long a call may wait for other ranks, in seconds.
        """
        from farandole.comm.mpi.backend import core_over  # loads MPI

        return cls.over(Dispatcher(core_over(comm, timedelta(seconds=timeout_s)), "of MPI"))

    def _bind(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.rank, self.size = dispatcher.core.rank, dispatcher.core.size
        self._direct, self._direct_async = dispatcher.direct, dispatcher.direct_async

    # ---- groups ----

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Split the ranks into new groups.  This is a collective call.

        All ranks that pass the same `color` form a group.  Within a group, ranks are ordered by `key`, and ranks with
        equal keys by their rank in this communicator.

        Returns:
            The communicator of this rank's group, or None if `color` is None.
        """
        colors = self.all_gather_object((color, key))
        if color is None:
            return None
        members = sorted(
            (rank for rank, (other, _) in enumerate(colors) if other == color),
            key=lambda rank: (colors[rank][1], rank),
        )
        return self.create_group(members)

    def create_group(self, members: Sequence[int]) -> Communicator:
        """Create a group of the ranks `members`, and return its communicator.

        `members` are ranks in this communicator.  Exactly these ranks must call this method.

        Raises:
            ValueError: if `members` contains a duplicate or an invalid rank, or does not contain this rank.
        """
        ranks = set(members)
        if len(ranks) < len(members) or self.rank not in ranks or not ranks <= set(range(self.size)):
            raise ValueError(
                f"create_group: expected distinct members between 0 and {self.size - 1}, including this rank "
                f"({self.rank}), got {list(members)}"
            )
        group: dist.ProcessGroup | None = getattr(self, "group", None)
        world = [] if group is None else [dist.get_global_rank(group, rank) for rank in members]
        in_order = group is not None and world == sorted(world)
        # only a torch group uses NCCL for CUDA tensors; other groups copy CUDA tensors to the host
        core = None if in_order and has_nccl() else self.dispatcher.core.subgroup(members)
        if core is not None:
            return Communicator.over(Dispatcher(core, f"{self.dispatcher.name}, ranks {list(members)}"))
        if group is None or not in_order:
            raise NotImplementedError(
                f"expected members in increasing order of global rank, got {world or list(members)}; sort them, "
                "because torch cannot reorder the ranks of this backend"
            )
        return Communicator(local_group(group, world))

    def set_roles(self, roles: Sequence[str]) -> None:
        """Set the role that error messages and stall warnings of this process show for each rank.

        For example, if the role of rank 3 is `stage 3`, messages contain `rank 3 (process 4711, stage 3)`.  The roles
        also apply to subgroups.  If the role of a rank is "", no role is shown.  Roles have no effect with torch's own
        backends, whose messages do not name ranks.

        Raises:
            ValueError: if the number of roles differs from the number of ranks.
        """
        if len(roles) != self.size:
            raise ValueError(f"expected a role for each of the {self.size} ranks, got {len(roles)} roles")
        self.dispatcher.core.set_roles(roles)

    def close(self) -> None:
        """Close a group that was created by `split`, `create_group` or `from_mpi`.

        Do not call this method for other groups, because torch destroys them.
        """
        self.dispatcher.close()

    def abort(self, note: str = "") -> None:
        """Immediately leave a group that was created by `split` or `create_group`.

        Pending calls of the group on this rank fail.  On other ranks, calls that wait for this rank raise `RankLeft`
        with the text `note`.  With torch's own backends, this rank only closes its connections.
        """
        self.dispatcher.abort(note)

    # ---- memory ----

    def empty(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Tensor:
        """Return an uninitialized tensor in memory that the ranks of this host share.  This is a collective call.

        Every rank passes the same shape and dtype and gets its own tensor.  The other ranks can access the memory of
        the tensor, so collectives can avoid copies.  If the group uses a backend other than farandole, or `device`
        is not the CPU, the tensor is in private memory.
        """
        if self.dispatcher.core.returns_work or (device is not None and device.type != "cpu"):
            return torch.empty(*shape, dtype=dtype, device=device)
        return self.dispatcher.allocate(shape, dtype)

    def shared(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Tensor | None:
        """Return one tensor of zeros that all ranks share.  This is a collective call.

        Every rank passes the same shape and dtype.  Every rank sees the other ranks' writes, so synchronize accesses,
        for example with `barrier`.

        Returns:
            The tensor, or None if the ranks cannot share memory.  This is the case if the group uses a backend other
            than farandole or spans several hosts, or if `device` is not the CPU.
        """
        if not self.shares_memory(device):
            return None
        core = self.dispatcher.core
        return self.dispatcher.made(lambda flags: core.allocate_shared(shape, dtype, flags))

    def shares_memory(self, device: torch.device | None = None) -> bool:
        """Return whether `shared` can allocate tensors on this device."""
        self.dispatcher.serves()
        return (device is None or device.type == "cpu") and self.dispatcher.core.shares_memory

    def algorithm(self, operation: str, nbytes: int) -> str:
        """Return the name of the algorithm that a collective would use.

        Args:
            operation: The name of a collective method, such as "all_reduce".
            nbytes: The size of this rank's input in bytes.

        Returns:
            The inter-node algorithm if the group spans several hosts, "shared memory" if it is on one host, or the
            name of the library that selects the algorithm.

        Raises:
            ValueError: if `operation` is not the name of a collective.
        """
        if not hasattr(self, f"{operation}_init"):
            raise ValueError(f"expected the name of a collective, such as 'all_reduce', got {operation!r}")
        return self.dispatcher.core.algorithm(operation, nbytes)

    # ---- reductions ----

    def all_reduce(
        self,
        tensor: Array,
        op: ReduceName = "sum",
        *,
        output: Array | None = None,
        compression: Compressor | Compression | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `tensor` over all ranks, in place or into `output`.

        Args:
            tensor: This rank's values.
            op: The reduction.
            output: A tensor of the same size and dtype for the results; by default `tensor`.
            compression: The compression for messages between hosts; only sums and averages of fp32, bf16 and fp16
                values can be compressed.  Pass a `Compressor` that was created for this tensor, such as
                `Int8().for_tensor(n)`, or `Compression` settings without error feedback.
            async_op: Whether to return a work object immediately.

        Returns:
            The work object if `async_op` is True, else None.

        Raises:
            ValueError: if both `output` and `compression` are given, or the compression does not support the group, the
                tensor or `op`.
            TypeError: if the dtype cannot be compressed.
        """
        if output is None and compression is None:
            work: dist.Work | None = self._path(async_op).all_reduce(tensor, op)
            if work is not None:
                return work if async_op else None
        if compression is not None:
            if output is not None:
                raise ValueError(
                    "all_reduce: expected `output` or `compression`, got both; copy `tensor` to `output` and reduce "
                    "`output`"
                )
            return compressed_all_reduce(self, written(tensor), op, compression, async_op)
        return self._reducing(table.ALL_REDUCE, *_in_place(tensor, output), op, async_op=async_op)

    def reduce(
        self, tensor: Array, root: int = 0, op: ReduceName = "sum", *, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce `tensor` over all ranks into the tensor on rank `root`; the other tensors keep their values."""
        return self._reducing(table.REDUCE, *_in_place(tensor), op, root, async_op=async_op)

    def reduce_scatter(
        self, output: Array, input: Array | Sequence[Array], op: ReduceName = "sum", *, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce `input` over all ranks, and store this rank's part of the result in `output`.

        `input` is a tensor with `size` equal parts along dimension 0, or a list with one tensor per rank.  The tensors
        in the list may have different lengths.
        """
        if work := self._path(async_op).reduce_scatter(output, input, op):
            return work if async_op else None
        return self._reducing(
            table.REDUCE_SCATTER, [written(output)], read_list(input), op, async_op=async_op
        )

    def scan(
        self,
        tensor: Array,
        op: ReduceName = "sum",
        *,
        exclusive: bool = False,
        output: Array | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce the tensors of all ranks up to and including this rank, in place or into `output` (MPI_Scan).

        If `exclusive` is True, the tensor of this rank is excluded (MPI_Exscan), and rank 0's output is unchanged.
        """
        _no_average(op)
        return self._reducing(table.SCAN, *_in_place(tensor, output), op, exclusive, async_op=async_op)

    # ---- data movement ----

    def all_gather(
        self, output: Array | Sequence[Array], input: Array, *, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the `input` of every rank into `output`, in rank order.

        `output` is a tensor that is `size` times as large as `input`, or a list with one tensor per rank.  The tensors
        in the list may have different lengths.
        """
        if work := self._path(async_op).all_gather(output, input):
            return work if async_op else None
        return self._run(table.ALL_GATHER, written_list(output), [read(input)], async_op=async_op)

    def broadcast(self, tensor: Array, root: int = 0, *, async_op: bool = False) -> dist.Work | None:
        """Copy `tensor` from rank `root` to all other ranks."""
        if work := self._path(async_op).broadcast(tensor, root):
            return work if async_op else None
        return self._run(table.BROADCAST, *self._broadcast_pair(tensor, root), root, async_op=async_op)

    def gather(
        self,
        tensor: Array,
        outputs: Sequence[Array] | None = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the `tensor` of every rank into the list `outputs` on rank `root`; other ranks omit `outputs`.

        If the tensors have different lengths, all ranks must pass `counts`, the number of elements for each rank.
        """
        return self._run(
            table.GATHER, written_list(outputs or []), [read(tensor)], root, counts, async_op=async_op
        )

    def scatter(
        self,
        tensor: Array,
        inputs: Sequence[Array] | None = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Copy `inputs[i]` from rank `root` to `tensor` on rank i; other ranks omit `inputs`.

        If the tensors have different lengths, all ranks must pass `counts`, the number of elements for each rank.
        """
        return self._run(
            table.SCATTER, [written(tensor)], read_list(inputs or []), root, counts, async_op=async_op
        )

    def all_to_all(
        self,
        output: Array | Sequence[Array],
        input: Array | Sequence[Array],
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Send part j of `input` to rank j, and receive part i of `output` from rank i.

        `input` and `output` are lists with one tensor per rank, or tensors that are split along dimension 0.  The parts
        of a tensor are equal, unless `input_splits` or `output_splits` specifies the number of rows in each part.
        """
        even = not (output_splits or input_splits)
        if even and (work := self._path(async_op).all_to_all(output, input)):
            return work if async_op else None
        pair = self._exchanged(output, input, output_splits, input_splits)
        return self._run(table.ALL_TO_ALL, *pair, async_op=async_op)

    def barrier(self, *, async_op: bool = False) -> dist.Work | None:
        """Wait until every rank of the group has called `barrier`."""
        if work := self._path(async_op).barrier():
            return work if async_op else None
        return self._run(table.BARRIER, [], [], async_op=async_op)

    # ---- persistent operations ----

    def all_reduce_init(
        self, tensor: Array, op: ReduceName = "sum", *, output: Array | None = None
    ) -> PersistentOperation:
        """Return a persistent `all_reduce`."""
        return self._prepare_reducing(table.ALL_REDUCE, *_in_place(tensor, output), op)

    def reduce_init(self, tensor: Array, root: int = 0, op: ReduceName = "sum") -> PersistentOperation:
        """Return a persistent `reduce`."""
        return self._prepare_reducing(table.REDUCE, *_in_place(tensor), op, root)

    def reduce_scatter_init(
        self, output: Array, input: Array | Sequence[Array], op: ReduceName = "sum"
    ) -> PersistentOperation:
        """Return a persistent `reduce_scatter`."""
        return self._prepare_reducing(table.REDUCE_SCATTER, [written(output)], read_list(input), op)

    def scan_init(
        self, tensor: Array, op: ReduceName = "sum", *, exclusive: bool = False, output: Array | None = None
    ) -> PersistentOperation:
        """Return a persistent `scan`."""
        _no_average(op)
        return self._prepare_reducing(table.SCAN, *_in_place(tensor, output), op, exclusive)

    def all_gather_init(self, output: Array | Sequence[Array], input: Array) -> PersistentOperation:
        """Return a persistent `all_gather`."""
        return self.dispatcher.prepare(table.ALL_GATHER, written_list(output), [read(input)])

    def broadcast_init(self, tensor: Array, root: int = 0) -> PersistentOperation:
        """Return a persistent `broadcast`."""
        return self.dispatcher.prepare(table.BROADCAST, *self._broadcast_pair(tensor, root), root)

    def gather_init(
        self,
        tensor: Array,
        outputs: Sequence[Array] | None = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
    ) -> PersistentOperation:
        """Return a persistent `gather`."""
        return self.dispatcher.prepare(
            table.GATHER, written_list(outputs or []), [read(tensor)], root, counts
        )

    def scatter_init(
        self,
        tensor: Array,
        inputs: Sequence[Array] | None = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
    ) -> PersistentOperation:
        """Return a persistent `scatter`."""
        return self.dispatcher.prepare(
            table.SCATTER, [written(tensor)], read_list(inputs or []), root, counts
        )

    def all_to_all_init(
        self,
        output: Array | Sequence[Array],
        input: Array | Sequence[Array],
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> PersistentOperation:
        """Return a persistent `all_to_all`."""
        pair = self._exchanged(output, input, output_splits, input_splits)
        return self.dispatcher.prepare(table.ALL_TO_ALL, *pair)

    def barrier_init(self) -> PersistentOperation:
        """Return a persistent `barrier`."""
        return self.dispatcher.prepare(table.BARRIER, [], [])

    # ---- point-to-point ----

    def isend(self, tensor: Array, to: int, tag: int = 0) -> dist.Work:
        """Start sending `tensor` to rank `to`; do not modify the tensor before `wait()` has returned."""
        if isinstance(tensor, Tensor) and (work := self._direct.post(tensor, to, tag, sends=True)):
            return work
        return self.post(read(tensor), to, tag, sends=True)

    def irecv(self, tensor: Array, source: int | None = None, tag: int = 0) -> dist.Work:
        """Start receiving into `tensor` from rank `source`, or from any rank if `source` is None."""
        work = None
        if source is not None and isinstance(tensor, Tensor):
            work = self._direct.post(tensor, source, tag, sends=False)
        if work is not None:
            return work
        return self.post(written(tensor), source or 0, tag, sends=False, any_rank=source is None)

    def send(self, tensor: Array, to: int, tag: int = 0) -> None:
        """Send `tensor` to rank `to`; when this method returns, `tensor` may be modified."""
        if isinstance(tensor, Tensor) and self._direct.send(tensor, to, tag):
            return
        self.isend(tensor, to, tag).wait()

    def recv(self, tensor: Array, source: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `source`, or from any rank if `source` is None; return the sender's rank."""
        if source is not None and isinstance(tensor, Tensor) and self._direct.recv(tensor, source, tag):
            return source
        work = self.irecv(tensor, source, tag)
        work.wait()
        return int(work._source_rank()) if source is None else source

    def batch(self) -> Batch:
        """Return a context manager that collects messages; on exit, it posts them together and waits for them.

            with comm.batch() as batch:
                batch.send(halo, right)
                batch.recv(other, left)

        Sends and receives may be added in any order; the order cannot cause a deadlock.
        """
        return Batch(self)

    def post(self, tensor: Tensor, peer: int, tag: int, *, sends: bool, any_rank: bool = False) -> dist.Work:
        """Start sending `tensor` to rank `peer` if `sends` is True, else start receiving into `tensor` from `peer`.

        If `any_rank` is True, the message is received from any rank, and `peer` is ignored.
        """
        if any_rank:
            peer = -1
        else:
            name, what = ("send", "the destination") if sends else ("recv", "the source")
            existing_rank(name, what, peer, self.size)
        core = self.dispatcher.core_for([tensor])
        if peer == self.rank and not core.returns_work:
            raise ValueError(
                f"expected a peer other than this rank, got {peer}, which is this rank; copy the tensor instead"
            )
        return core.post_send(tensor, peer, tag) if sends else core.post_recv(tensor, peer, tag)

    # ---- Python objects ----

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a list with the `value` of every rank, in rank order; the values must be picklable."""
        return objects.all_gather(self, value)

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """Return the picklable `value` of rank `root`; the values of other ranks are ignored."""
        return objects.broadcast(self, value, root)

    # ---- calls ----

    def _path(self, async_op: bool) -> Any:
        """Return the fast path; its methods return None for unsupported calls."""
        return self._direct_async if async_op else self._direct

    def _run(
        self,
        operation: table.Operation,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *constants: Any,
        async_op: bool,
    ) -> dist.Work | None:
        work = self.dispatcher.run(operation, outputs, inputs, *constants, async_op=async_op)
        return work if async_op else None

    def _reducing(
        self,
        operation: table.Operation,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: str,
        *constants: Any,
        async_op: bool,
    ) -> dist.Work | None:
        reduction = reduction_number(op, outputs[0].dtype)
        return self._run(operation, outputs, inputs, reduction, *constants, async_op=async_op)

    def _prepare_reducing(
        self,
        operation: table.Operation,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: str,
        *constants: Any,
    ) -> PersistentOperation:
        reduction = reduction_number(op, outputs[0].dtype)
        return self.dispatcher.prepare(operation, outputs, inputs, reduction, *constants)

    def _broadcast_pair(self, tensor: Array, root: int) -> tuple[list[Tensor], list[Tensor]]:
        used = read(tensor) if root == self.rank else written(tensor)
        return [used], [used]

    def _exchanged(
        self,
        output: Array | Sequence[Array],
        input: Array | Sequence[Array],
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        outputs = written_list(output) if isinstance(output, (list, tuple)) else written(output)  # type: ignore[arg-type]
        inputs = read_list(input) if isinstance(input, (list, tuple)) else read(input)  # type: ignore[arg-type]
        return table.exchanged(outputs, inputs, output_splits, input_splits, self.size)


def _in_place(tensor: Array, output: Array | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the lists of outputs and inputs; without `output`, both contain `tensor`."""
    if output is not None:
        return [written(output)], [read(tensor)]
    both = written(tensor)
    return [both], [both]


def _no_average(op: str) -> None:
    if op == "avg":
        raise ValueError(
            "scan: expected one of the reductions 'sum', 'product', 'min', 'max', 'and', 'or', 'xor', got 'avg'; "
            "use 'sum' and divide the result"
        )
