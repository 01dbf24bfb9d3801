"""Which rank computes which part of a model: cells on the axes of parallelism, and the groups of ranks among them.

    mesh = Mesh.box(8, data=2, pipeline=2, tensor=2)            # rank 0 is data 0, pipeline 0, tensor 0; rank 1 is tensor 1
    mesh.peers(cell, "tensor")                                  # the cells that differ from `cell` on that axis only
    groups = mesh.connect(comm, [("tensor",), ("data",)])       # collective
    groups.of(cell, "tensor").comm.all_reduce(tensor)

A *cell* is a place in the mesh: one coordinate on each axis, and the rank that holds it.  Most meshes are boxes, with one cell per
rank.  Two are not: a pipeline whose stages have different widths, and a mirrored one, where each rank holds one stage of
each direction (GEMS: Jain et al., 2020), so that with an odd number of stages the rank in the middle holds the same stage twice.

A mesh is plain data, the same on every rank.  Nothing here depends on which rank computes it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from farandole.comm.communicator import Communicator

AXES = ("data", "pipeline", "mirror", "spatial", "context", "expert", "tensor")
"""From the outermost, whose ranks are far apart, to the innermost, whose ranks are neighbors and communicate most."""


LOSS_AXES = ("data", "context", "expert")
"""The axes along which ranks compute different samples or tokens, and so have losses of their own."""


class MeshError(ValueError):
    """A mesh that cannot be made; the message names the sizes, and the nearest that can."""


@dataclass(frozen=True, order=True)
class Cell:
    """A place in a mesh, and the rank that holds it."""

    data: int = 0
    pipeline: int = 0
    mirror: int = 0
    spatial: int = 0
    context: int = 0
    expert: int = 0
    tensor: int = 0
    rank: int = 0

    def at(self, axes: Iterable[str]) -> tuple[int, ...]:
        """The coordinates on some axes."""
        return tuple(getattr(self, axis) for axis in axes)


@dataclass(frozen=True)
class SubAxis:
    """A factor of an axis: coordinate `(c // stride) % size` of the coordinate c on `axis`."""

    axis: str
    stride: int
    size: int


class Mesh:
    """The cells of all ranks.

    Args:
        cells: each with coordinates of its own, and ranks that are numbered from 0.
        factors: sub-axes of an axis, as `{"data": {"hosts": 2, "local": 4}}`, the outer one first.  They are called
            "data.hosts" and "data.local".

    Raises:
        MeshError: for cells with equal coordinates, ranks without a cell, and factors whose product is not the size of
            their axis.
    """

    def __init__(self, cells: Iterable[Cell], factors: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self.cells = tuple(sorted(cells))
        self.size = 1 + max((cell.rank for cell in self.cells), default=-1)
        if len({cell.at(AXES) for cell in self.cells}) < len(self.cells):
            raise MeshError("two cells have the same coordinates")
        if {cell.rank for cell in self.cells} != set(range(self.size)):
            raise MeshError(f"expected a cell for each of the {self.size} ranks")
        self._held: dict[int, list[Cell]] = {rank: [] for rank in range(self.size)}
        for cell in self.cells:
            self._held[cell.rank].append(cell)
        self.stages = 1 + max(cell.pipeline for cell in self.cells)
        self._widths = {
            (axis, stage): 1 + max(getattr(c, axis) for c in self.cells if c.pipeline == stage)
            for axis in AXES
            for stage in range(self.stages)
        }
        self.sub_axes: dict[str, SubAxis] = {}
        for axis, sizes in (factors or {}).items():
            self._factor(axis, sizes)

    def _factor(self, axis: str, sizes: Mapping[str, int]) -> None:
        widths = {self.width(axis, stage) for stage in range(self.stages)}
        if widths != {math.prod(sizes.values())}:
            shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise MeshError(f"{axis}: {shown} is not the size of the axis, {max(widths)}")
        stride = math.prod(sizes.values())
        for name, size in sizes.items():
            stride //= size
            self.sub_axes[f"{axis}.{name}"] = SubAxis(axis, stride, size)

    # ---- meshes ----

    @classmethod
    def box(
        cls,
        ranks: int | Sequence[int],
        *,
        factors: Mapping[str, Mapping[str, int]] | None = None,
        **sizes: int,
    ) -> Mesh:
        """Return the mesh whose axes have these sizes; `mirror=2` adds the reversed pipeline on the same ranks.

        Args:
            ranks: how many there are, or the ranks in the order in which cells get them (`by_host`).

        Raises:
            MeshError: if the product of the sizes, without the mirror, is not the number of ranks.
        """
        unknown = set(sizes) - set(AXES)
        if unknown:
            raise MeshError(f"{', '.join(sorted(unknown))}: the axes are {', '.join(AXES)}")
        inner = {axis: sizes.get(axis, 1) for axis in AXES if axis not in ("data", "pipeline", "mirror")}
        stages = [inner] * sizes.get("pipeline", 1)
        return cls.of_stages(
            ranks, stages, data=sizes.get("data", 1), mirror=sizes.get("mirror", 1), factors=factors
        )

    @classmethod
    def of_stages(
        cls,
        ranks: int | Sequence[int],
        stages: Sequence[Mapping[str, int]],
        *,
        data: int = 1,
        mirror: int = 1,
        factors: Mapping[str, Mapping[str, int]] | None = None,
    ) -> Mesh:
        """Return the mesh of a pipeline whose stages have sizes of their own, as `[{"spatial": 4}, {"tensor": 1}]`.

        With `mirror=2` stage s of the reversed direction is on the ranks of stage `len(stages) - 1 - s`; if these have other
        sizes, cells take the ranks of that stage in turn.
        """
        order = list(range(ranks)) if isinstance(ranks, int) else list(ranks)
        if mirror not in (1, 2):
            raise MeshError(f"mirror={mirror}: 1, or 2 for a pipeline in both directions")
        wrong = {name: size for stage in stages for name, size in stage.items() if size < 1}
        if data < 1 or wrong:
            raise MeshError(f"{wrong or {'data': data}}: an axis has 1 rank or more")
        widths = [math.prod(stage.values()) for stage in stages]
        needed = data * sum(widths)
        if needed != len(order):
            raise MeshError(_wrong_number(stages, data, needed, len(order)))
        supply = iter(order)
        cells: list[Cell] = []
        for replica in range(data):
            held = [list(itertools.islice(supply, width)) for width in widths]
            for stage, sizes in enumerate(stages):
                for direction in range(mirror):
                    holders = held[len(stages) - 1 - stage if direction else stage]
                    places = itertools.product(*(range(size) for size in sizes.values()))
                    for place, rank in zip(places, itertools.cycle(holders), strict=False):
                        where = dict(zip(sizes, place, strict=True))
                        cells.append(Cell(data=replica, pipeline=stage, mirror=direction, rank=rank, **where))
        return cls(cells, factors)

    # ---- coordinates ----

    @property
    def losses(self) -> int:
        """The number of ranks that have losses of their own: in a loop of PyTorch, the gradient is the mean over them."""
        return math.prod(self.width(axis, self.stages - 1) for axis in LOSS_AXES)

    def of_rank(self, rank: int) -> list[Cell]:
        """The cells that a rank holds."""
        return self._held[rank]

    def width(self, axis: str, stage: int = 0) -> int:
        """The size of an axis, or of a sub-axis, in a stage of the pipeline."""
        if axis in self.sub_axes:
            return self.sub_axes[axis].size
        if axis == "pipeline":
            return self.stages
        return self._widths[axis, stage]

    def coordinate(self, cell: Cell, axis: str) -> int:
        """The coordinate of a cell on an axis or a sub-axis."""
        if axis in AXES:
            return int(getattr(cell, axis))
        if axis not in self.sub_axes:
            known = ", ".join((*AXES, *self.sub_axes))
            raise MeshError(f"{axis!r} is no axis of this mesh; they are {known}")
        part = self.sub_axes[axis]
        return int(getattr(cell, part.axis)) // part.stride % part.size

    def others(self, axes: Sequence[str]) -> list[str]:
        """The axes, and parts of factored ones, that are not among `axes`."""
        rest = []
        for axis in AXES:
            if axis in axes:
                continue
            parts = [name for name, sub in self.sub_axes.items() if sub.axis == axis]
            if any(part in axes for part in parts):
                rest += [part for part in parts if part not in axes]
            else:
                rest.append(axis)
        return rest

    def peers(self, cell: Cell, *axes: str) -> tuple[Cell, ...]:
        """The cells that differ from `cell` on these axes only, itself among them, in the order of their coordinates."""
        for axis in axes:
            self.coordinate(cell, axis)  # raises for an unknown one
        rest = self.others(axes)
        here = [self.coordinate(cell, axis) for axis in rest]
        return tuple(c for c in self.cells if [self.coordinate(c, axis) for axis in rest] == here)

    # ---- groups and generators ----

    def connect(
        self,
        comm: Communicator,
        axes: Iterable[Sequence[str]] = (),
        rank_sets: Iterable[Sequence[int]] = (),
    ) -> Groups:
        """Make the groups of all cells for each of these sets of axes, and for further sets of ranks; a collective call.

        All ranks of `comm` pass the same.  Groups of the same ranks are made once.
        """
        wanted = {ranks_of(self.peers(cell, *names)) for names in axes for cell in self.cells}
        wanted |= {tuple(sorted(set(ranks))) for ranks in rank_sets}
        return Groups(self, comm, sorted(wanted))

    def seed(self, seed: int, cell: Cell, *axes: str) -> int:
        """Return a seed that depends on the coordinates on these axes only: cells that differ elsewhere have the same."""
        text = f"{seed} " + " ".join(f"{axis}={self.coordinate(cell, axis)}" for axis in sorted(axes))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")

    def generator(self, seed: int, cell: Cell, *axes: str, device: str = "cpu") -> torch.Generator:
        """Return a generator of random numbers with that seed."""
        return torch.Generator(device).manual_seed(self.seed(seed, cell, *axes))


@dataclass(frozen=True)
class Group:
    """The communicator among some cells, which are in the order of their coordinates; None if one rank holds them all.

    `places[i]` is the rank in the communicator of the i-th cell.  Cells of one rank have the same place, and a mirrored mesh may
    have cells in another order than their ranks.
    """

    cells: tuple[Cell, ...]
    ranks: tuple[int, ...]
    comm: Communicator | None

    @property
    def places(self) -> list[int]:
        """The rank in the communicator of every cell."""
        return [self.ranks.index(cell.rank) for cell in self.cells]


@dataclass
class Groups:
    """The communicators of a mesh that this rank is in, made in one order on all ranks."""

    mesh: Mesh
    comm: Communicator
    sets: Sequence[tuple[int, ...]]
    _made: dict[tuple[int, ...], Communicator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make them.

        No two ranks wait for each other: of all groups that are not complete, the first in the order of `sets` can be made, as
        none of its members is at an earlier one, and none at a later one.
        """
        if self.comm.size != self.mesh.size:
            raise MeshError(f"the mesh has {self.mesh.size} ranks, the communicator {self.comm.size}")
        everyone = tuple(range(self.comm.size))
        for ranks in self.sets:
            if ranks == everyone:
                self._made[ranks] = self.comm
            elif self.comm.rank in ranks and len(ranks) > 1:
                self._made[ranks] = self.comm.create_group(ranks)

    def of(self, cell: Cell, *axes: str) -> Group:
        """The group of the cells that differ from `cell`, which this rank holds, on these axes only."""
        cells = self.mesh.peers(cell, *axes)
        ranks = ranks_of(cells)
        return Group(cells, ranks, self.of_ranks(ranks))

    def of_ranks(self, ranks: Sequence[int]) -> Communicator | None:
        """The communicator of a set of ranks; None for one rank."""
        key = tuple(sorted(ranks))
        if len(key) == 1:
            return None
        if key not in self._made:
            raise MeshError(
                f"ranks {', '.join(map(str, key))} were not connected: name their axes in Mesh.connect"
            )
        return self._made[key]


def ranks_of(cells: Iterable[Cell]) -> tuple[int, ...]:
    """The ranks that hold some cells, each once."""
    return tuple(sorted({cell.rank for cell in cells}))


def by_host(hosts: Sequence[str]) -> list[int]:
    """The ranks in an order in which those of one host are neighbors; `hosts` has the host of every rank."""
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    return sorted(range(len(hosts)), key=lambda rank: (first[hosts[rank]], rank))


def _wrong_number(stages: Sequence[Mapping[str, int]], data: int, needed: int, ranks: int) -> str:
    sizes = {"data": data, "pipeline": len(stages)}
    if len({tuple(stage.items()) for stage in stages}) == 1:
        sizes |= stages[0]
        text = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"
    else:
        text = f"data={data} x stages of {', '.join(str(math.prod(s.values())) for s in stages)} ranks"
    nearest = max(1, ranks // (needed // data))
    return f"{text} needs {needed} ranks, {ranks} were launched; nearest: data={nearest} with {nearest * (needed // data)} ranks"
