"""This process's position on the device mesh, and the layouts that axes declare while they transform a model.

Each axis is implemented by a function `apply(model, position, plan, layouts)`.  The function replaces parameters with
this rank's shards, and adds collectives over the axis to the model.  It declares in `layouts` which boxes of each
tensor a rank stores and which copies have equal gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from farandole.comm import endpoint
from farandole.comm.communicator import Communicator, ReduceName
from farandole.comm.work import COMPLETED
from farandole.layout import Layout, LayoutError, Shard
from farandole.mesh import Cell, Groups, Mesh
from farandole.models.chunks import repetitions
from farandole.plan import PlanError

Sent = list[tuple[tuple[int, ...], float]]
"""For each operation of a dry run, the ranks of the group and the number of bytes that this rank sends."""


class AxisCommunicator:
    """The communicator of the ranks along a mesh axis.

    In a dry run, tensors have no values (`memory.dry_run`).  Collectives then transfer nothing, and append to
    `sent` the number of bytes that this rank would send.  In a ring, each rank sends (size - 1) / size of a tensor for
    a reduce-scatter or an all-gather, and twice as much for an all-reduce.  A point-to-point message in a ring is
    recorded as a message between the first and the last rank, which have the slowest link: all ranks of the ring send
    at the same time, so this link determines the time.

    Args:
        ranks: the ranks of the group, as numbered in the mesh.
        rank: this rank's index in `ranks`.
        comm: the communicator of the ranks; None if they do not communicate, or until `Position.connect` creates the
            group.
        sent: the list that collectives append to in a dry run.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, comm: Communicator | None = None, sent: Sent | None = None
    ) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self._comm, self._sent = comm, sent

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def connect(self, parent: AxisCommunicator, members: Sequence[int]) -> None:
        """Create this communicator's process group from the ranks with indices `members` in `parent`.

        All of these ranks must call this method.
        """
        if parent._comm is not None:
            self._comm = parent._comm.create_group(members)

    def abort(self, note: str = "") -> None:
        """Leave the group immediately; ranks that wait for this rank raise `RankLeft` with `note`."""
        self._connected.abort(note)

    def reconnect(self, parent: Communicator) -> None:
        """Leave the group, and create a group of the same ranks from `parent`.

        All of these ranks must call this method.
        """
        self.abort()
        self._comm = parent.create_group(self.ranks)

    @property
    def overlaps(self) -> bool:
        """Return whether transfers overlap with computation.

        Transfers through shared memory do not overlap, because the ranks' CPU cores copy the data.
        """
        return self._comm is not None and not self._comm.shares_memory()

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum", *, output: Tensor | None = None) -> None:
        """Reduce `tensor` over the ranks; see `Communicator.all_reduce`."""
        if not self._is_dry(2 * (self.size - 1) / self.size, tensor):
            self._connected.all_reduce(tensor, op, output=output)

    def start_all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start summing a tensor over the ranks in place; do not use the tensor until the returned work finishes."""
        if self._is_dry(2 * (self.size - 1) / self.size, tensor):
            return COMPLETED
        work = self._connected.all_reduce(tensor, async_op=True)
        assert work is not None
        return work

    def all_gather(self, output: Tensor | Sequence[Tensor], input: Tensor) -> None:
        """Gather all ranks' tensors; see `Communicator.all_gather`."""
        if not self._is_dry(self.size - 1, input):
            self._connected.all_gather(output, input)

    def reduce_scatter(self, output: Tensor, input: Tensor | Sequence[Tensor]) -> None:
        """Reduce tensors and scatter the result; see `Communicator.reduce_scatter`."""
        if not self._is_dry(self.size - 1, output):
            self._connected.reduce_scatter(output, input)

    def all_to_all(
        self, output: Sequence[Tensor], input: Sequence[Tensor], *, async_op: bool = False
    ) -> dist.Work | None:
        """Exchange tensors; see `Communicator.all_to_all`."""
        others = [number for number in range(self.size) if number != self.rank]
        dry = [self._is_dry(1, input[other], (self.rank, other)) for other in others]
        if any(dry):
            return None
        return self._connected.all_to_all(output, input, async_op=async_op)

    def receive_buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialized tensor with the dtype and device of `like` for the result of a collective."""
        if isinstance(like, FakeTensor):
            return like.new_empty(shape)
        return self._connected.dispatcher.receive_buffer(shape, like)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> dist.Work:
        """Start sending a tensor; see `Communicator.isend`."""
        if self._is_dry(1, tensor, (0, -1)):
            return COMPLETED
        return self._connected.isend(tensor, to, tag)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> dist.Work:
        """Start receiving a tensor; see `Communicator.irecv`.  In a dry run, only the sender records the message."""
        if isinstance(tensor, FakeTensor):
            return COMPLETED
        return self._connected.irecv(tensor, source, tag)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the picklable `value` of rank `root`; see `Communicator.broadcast_object`."""
        return self._connected.broadcast_object(value, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in rank order; see `Communicator.all_gather_object`."""
        return self._connected.all_gather_object(value)

    @property
    def _connected(self) -> Communicator:
        assert self._comm is not None  # only dry runs have no communicator
        return self._comm

    def _is_dry(self, times: float, tensor: Tensor, among: Sequence[int] = ()) -> bool:
        """Return whether `tensor` has no values; if so, record the transfer of `times` times its size."""
        if not isinstance(tensor, FakeTensor):
            return False
        if self._sent is not None:
            ranks = tuple(self.ranks[index] for index in among) or self.ranks
            self._sent.append((ranks, repetitions() * times * tensor.nbytes))
        return True


@dataclass(frozen=True)
class Position:
    """A cell of the mesh, and the communicators of the rank in this cell.

    `groups` is None if ranks do not communicate, as in the planner.  In a dry run, collectives append to `sent`.
    """

    mesh: Mesh
    cell: Cell
    groups: Groups | None = None
    sent: Sent | None = None
    _axes: dict[tuple[str, ...], AxisCommunicator] = field(default_factory=dict, compare=False)
    _parts: dict[tuple[str, tuple[int, ...]], AxisCommunicator] = field(default_factory=dict, compare=False)

    def size(self, axis: str) -> int:
        """Return the number of ranks on an axis."""
        return self.mesh.width(axis, self.cell.pipeline)

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        return self.mesh.coordinate(self.cell, axis)

    def along(self, axis: str) -> tuple[Cell, ...]:
        """Return this cell and the cells that differ from it only on `axis`."""
        return self.mesh.peers(self.cell, axis)

    def comm(self, *axes: str) -> AxisCommunicator | None:
        """Return the communicator of the ranks along these axes.

        The result is None for a single rank, or if ranks do not communicate.
        """
        peers = self.mesh.peers(self.cell, *axes)
        if len(peers) == 1 or (self.groups is None and self.sent is None):
            return None
        if axes not in self._axes:
            ranks = [cell.rank for cell in peers]
            if ranks != sorted(ranks):
                raise PlanError(
                    f"{', '.join(axes)}: ranks {', '.join(map(str, ranks))} share layers, but are on several hosts whose "
                    "ranks are not consecutive; number the ranks host by host"
                )
            comm = None if self.groups is None else self.groups.of(self.cell, *axes).comm
            self._axes[axes] = AxisCommunicator(ranks, peers.index(self.cell), comm, self.sent)
        return self._axes[axes]

    def part_of(self, axis: str, coordinates: Sequence[int]) -> AxisCommunicator | None:
        """Return the communicator of the ranks at `coordinates` on an axis.

        `coordinates` must include this rank's coordinate.  The communicator can be used after `connect`.
        """
        comm, key = self.comm(axis), (axis, tuple(coordinates))
        if comm is None or len(coordinates) == 1:
            return None
        if key not in self._parts:
            ranks = [comm.ranks[coordinate] for coordinate in coordinates]
            self._parts[key] = AxisCommunicator(ranks, key[1].index(comm.rank), sent=self.sent)
        return self._parts[key]

    def parts(self) -> list[AxisCommunicator]:
        """Return all communicators that `part_of` returned, in the same order on all ranks."""
        return list(self._parts.values())

    def connect(self) -> None:
        """Create the groups of all communicators that `part_of` returned.  This is a collective call.

        Call this method after all axes have been applied, so that an error on a single rank does not block other ranks.
        """
        for (axis, coordinates), part in self._parts.items():
            comm = self.comm(axis)
            assert comm is not None
            part.connect(comm, coordinates)


def hosts_of(comm: Communicator) -> list[object]:
    """Return the host of each rank.  This is a collective call."""
    return comm.all_gather_object(endpoint.host_identity())


class Layouts(dict[str, Layout]):
    """The layouts of a model's parameters, keyed by name.

    Initially, every rank has a complete copy of every parameter.  Tied parameters have one layout, under their first
    name.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__({name: Layout(name, tuple(p.shape)) for name, p in model.named_parameters()})
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def of(self, parameter: nn.Parameter) -> Layout:
        """Return the layout of a parameter."""
        return self[self._names[id(parameter)]]

    def equal_gradients(self, parameter: nn.Parameter, axis: str) -> None:
        """Declare that the copies of `parameter` on `axis` have equal gradients, which must not be summed."""
        layout = self.of(parameter)
        self[layout.name] = replace(layout, same=layout.same | {axis})

    def shard(self, parameter: nn.Parameter, axis: str, shard: Shard, position: Position) -> None:
        """Replace a parameter's values with this rank's shard along `axis`; do nothing if `axis` already shards it."""
        layout = self.of(parameter)
        if any(name == axis for name, _ in layout.shards):
            return
        if any(other.dim == shard.dim for _, other in layout.shards):
            raise LayoutError(
                f"{layout.name}: dimension {shard.dim} is already sharded along an axis other than {axis!r}; shard "
                "another dimension"
            )
        alone = replace(layout, shards=((axis, shard),))
        self[layout.name] = replace(layout, shards=(*layout.shards, (axis, shard)))
        _set_data(parameter, own_part(parameter.data, alone, position.mesh, position.cell))


def _set_data(parameter: nn.Parameter, value: Tensor) -> None:
    """Replace a parameter's values with a tensor of another shape."""
    # While the graph of an earlier forward pass is alive, autograd reuses the parameter's gradient accumulator, which
    # expects gradients of the old shape.  A change of the dtype makes autograd create a new accumulator.
    other = torch.float16 if parameter.dtype == torch.float32 else torch.float32
    parameter.data = value.new_empty(0, dtype=other)
    parameter.data = value


def own_part(value: Tensor, layout: Layout, mesh: Mesh, cell: Cell) -> Tensor:
    """Return the cell's shard of the complete tensor `value`."""
    for axis, shard in layout.shards:
        boxes = replace(layout, shards=((axis, shard),)).boxes(mesh, cell)
        ends = [box[shard.dim] for box in boxes]
        value = torch.cat([value.narrow(shard.dim, start, end - start) for start, end in ends], shard.dim)
    return value
