"""This process's position on the device mesh, and the layouts that axes declare while they transform a model.

An axis is one function `apply(model, position, plan, layouts)`.  It replaces parameters by this rank's shards, adds the
collectives between the ranks of the axis to the model's calls, and declares in `layouts` which boxes of each tensor a
rank stores and which copies have equal gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from farandole.comm import endpoint
from farandole.comm.communicator import Communicator
from farandole.layout import Layout, LayoutError, Shard
from farandole.mesh import Cell, Groups, Mesh
from farandole.models.chunks import repetitions

Sent = list[tuple[tuple[int, ...], float]]
"""The ranks of a group, and the bytes that this rank sends to the others, for each operation of a dry run."""


@dataclass(frozen=True)
class Position:
    """A cell of the mesh, and the communicators of its rank.

    `groups` is None if ranks do not communicate, as in the planner.  In a dry run, operations append to `sent`.
    """

    mesh: Mesh
    cell: Cell
    groups: Groups | None = None
    sent: Sent | None = None
    _subgroups: dict[tuple[str, tuple[int, ...]], Communicator] = field(default_factory=dict, compare=False)

    def size(self, axis: str) -> int:
        """Return the number of ranks on an axis."""
        return self.mesh.width(axis, self.cell.pipeline)

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        return self.mesh.coordinate(self.cell, axis)

    def comm(self, *axes: str) -> Communicator | None:
        """Return the communicator of the ranks along these axes; None for a single rank."""
        if self.groups is not None:
            return self.groups.of(self.cell, *axes).comm
        peers = self.mesh.peers(self.cell, *axes)
        if self.sent is None or len(peers) == 1:
            return None
        ranks = tuple(cell.rank for cell in peers)
        return cast(Communicator, DryRun(ranks, peers.index(self.cell), self.sent))

    def part_of(self, axis: str, coordinates: Sequence[int]) -> Communicator | None:
        """Return the communicator of the ranks at `coordinates` on an axis; this rank must be one of them."""
        comm, key = self.comm(axis), (axis, tuple(coordinates))
        if comm is None or len(coordinates) == 1:
            return None
        if key not in self._subgroups:
            self._subgroups[key] = comm.create_group(coordinates)
        return self._subgroups[key]


def hosts_of(comm: Communicator) -> list[object]:
    """Return the host of each rank.  This is a collective call."""
    return comm.all_gather_object(endpoint.host_identity())


class DryRun:
    """Replaces a communicator of `ranks` in a dry run: it transfers nothing, and records the bytes that a rank would send.

    A ring sends (size - 1) / size of a tensor in a reduce-scatter or an all-gather, and twice as much in an all-reduce.
    A message is recorded for the first and the last of the ranks, because all ranks of a ring send at the same time, and
    the slowest link determines the time.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, sent: Sent) -> None:
        self.ranks, self.rank, self._sent = ranks, rank, sent

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def create_group(self, members: Sequence[int]) -> DryRun:
        """Return a communicator of some of the ranks."""
        ranks = tuple(self.ranks[member] for member in members)
        return DryRun(ranks, list(members).index(self.rank), self._sent)

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, output: Tensor | None = None, async_op: bool = False
    ) -> Completed:
        """Record an all-reduce."""
        return self._record(2 * (self.size - 1) / self.size, tensor)

    def all_gather(
        self, output: Tensor | Sequence[Tensor], input: Tensor, *, async_op: bool = False
    ) -> Completed:
        """Record an all-gather."""
        return self._record(self.size - 1, input)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor | Sequence[Tensor],
        op: str = "sum",
        *,
        async_op: bool = False,
    ) -> Completed:
        """Record a reduce-scatter."""
        return self._record(self.size - 1, output)

    def all_to_all(
        self, output: Sequence[Tensor], input: Sequence[Tensor], *, async_op: bool = False
    ) -> Completed:
        """Record an all-to-all: one message to each other rank."""
        for number, part in enumerate(input):
            if number != self.rank:
                self._record(1, part, (self.ranks[self.rank], self.ranks[number]))
        return Completed()

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Completed:
        """Record a message."""
        return self._record(1, tensor, (self.ranks[0], self.ranks[-1]))

    def irecv(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> Completed:
        """Record nothing, because the sender counts the message."""
        return Completed()

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        """Record a message."""
        self.isend(tensor, to, tag)

    def recv(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> None:
        """Record nothing, because the sender counts the message."""

    def batch(self) -> DryBatch:
        """Return an empty batch of messages."""
        return DryBatch(self)

    def _record(self, times: float, tensor: Tensor, ranks: tuple[int, ...] | None = None) -> Completed:
        self._sent.append((ranks or self.ranks, repetitions() * times * tensor.nbytes))
        return Completed()


class Completed:
    """Replaces the work object of an operation in a dry run."""

    def wait(self) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


class DryBatch:
    """Replaces a batch of messages (`Communicator.batch`) in a dry run."""

    def __init__(self, comm: DryRun) -> None:
        self._comm = comm

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        """Record a message."""
        self._comm.isend(tensor, to, tag)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        """Record nothing, because the sender counts the message."""

    def start(self) -> list[Completed]:
        """Return the work of all messages."""
        return [Completed()]

    def __enter__(self) -> DryBatch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        pass


class Layouts(dict[str, Layout]):
    """The layouts of a model's parameters by name; initially, every rank has a complete copy of every parameter.

    Tied parameters have one layout, under their first name.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__({name: Layout(name, tuple(p.shape)) for name, p in model.named_parameters()})
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def of(self, parameter: nn.Parameter) -> Layout:
        """Return the layout of a parameter."""
        return self[self._names[id(parameter)]]

    def equal_gradients(self, parameter: nn.Parameter, axis: str) -> None:
        """Declare that the copies on `axis` have equal gradients, which are therefore not summed."""
        layout = self.of(parameter)
        self[layout.name] = replace(layout, same=layout.same | {axis})

    def shard(self, parameter: nn.Parameter, axis: str, shard: Shard, position: Position) -> None:
        """Replace a parameter's values by this rank's shard along `axis`, unless the parameter is already sharded along `axis`."""
        layout = self.of(parameter)
        if any(name == axis for name, _ in layout.shards):
            return
        if any(other.dim == shard.dim for _, other in layout.shards):
            raise LayoutError(
                f"{layout.name}: dimension {shard.dim} is already sharded along another axis than {axis!r}; shard "
                "another dimension"
            )
        alone = replace(layout, shards=((axis, shard),))
        self[layout.name] = replace(layout, shards=(*layout.shards, (axis, shard)))
        parameter.data = own_part(parameter.data, alone, position.mesh, position.cell)


def own_part(value: Tensor, layout: Layout, mesh: Mesh, cell: Cell) -> Tensor:
    """Return the part of a complete tensor that a cell stores, in separate memory."""
    for axis, shard in layout.shards:
        boxes = replace(layout, shards=((axis, shard),)).boxes(mesh, cell)
        ends = [box[shard.dim] for box in boxes]
        value = torch.cat([value.narrow(shard.dim, start, end - start) for start, end in ends], shard.dim)
    return value
