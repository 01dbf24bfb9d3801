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


@dataclass(frozen=True)
class Position:
    """A cell of the mesh, and the communicators of its rank.

    `groups` is None if ranks do not communicate, as in the planner.  In a dry run, collectives append the bytes that a
    rank sends to `sent`.
    """

    mesh: Mesh
    cell: Cell
    groups: Groups | None = None
    sent: list[float] | None = None
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
        return cast(Communicator, DryRun(len(peers), peers.index(self.cell), self.sent))

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
    """Replaces a communicator of `size` ranks in a dry run: it transfers nothing, and counts the bytes that a rank would send.

    A ring sends (size - 1) / size of a tensor in a reduce-scatter or an all-gather, and twice as much in an all-reduce.
    """

    def __init__(self, size: int, rank: int, sent: list[float]) -> None:
        self.size, self.rank, self._sent = size, rank, sent

    def create_group(self, members: Sequence[int]) -> DryRun:
        """Return a communicator of some of the ranks."""
        return DryRun(len(members), list(members).index(self.rank), self._sent)

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, output: Tensor | None = None) -> None:
        """Count an all-reduce."""
        self._count(2 * (self.size - 1) / self.size, tensor)

    def all_gather(self, output: Tensor | Sequence[Tensor], input: Tensor) -> None:
        """Count an all-gather."""
        self._count(self.size - 1, input)

    def reduce_scatter(self, output: Tensor, input: Tensor | Sequence[Tensor]) -> None:
        """Count a reduce-scatter."""
        self._count(self.size - 1, output)

    def all_to_all(
        self, output: Sequence[Tensor], input: Sequence[Tensor], *, async_op: bool = False
    ) -> None:
        """Count an all-to-all."""
        for number, part in enumerate(input):
            self._count(float(number != self.rank), part)

    def _count(self, times: float, tensor: Tensor) -> None:
        self._sent.append(times * tensor.nbytes)


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
