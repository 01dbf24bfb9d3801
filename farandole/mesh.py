"""The device mesh: the coordinates of each rank on the parallelism axes, and the groups along the axes.

    mesh = Mesh.box(8, data=2, pipeline=2, tensor=2)            # rank 0 is data 0, pipeline 0, tensor 0
    mesh.peers(cell, "tensor")                                  # `cell` and the cells that differ on that axis only
    groups = mesh.connect(comm, [("tensor",), ("data",)])       # a collective call
    groups.of(cell, "tensor").comm.all_reduce(tensor)

A *cell* has one coordinate on each axis, and belongs to one rank.  Most meshes are boxes with one cell per rank.  There
are two exceptions.  The stages of a pipeline may have different widths.  In a mirrored pipeline each rank holds one
stage of each direction (GEMS: Jain et al., 2020); with an odd number of stages the middle rank holds the same stage
twice.

A mesh contains no communicator and is identical on all ranks.
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
"""The axes in order, from the outermost (distant ranks) to the innermost (adjacent ranks, which communicate most)."""


LOSS_AXES = ("data", "context", "expert")
"""The axes along which ranks process different samples or tokens; gradients are averaged over these ranks."""


SAMPLE_AXES = ("data", "expert")
"""The axes along which ranks have different samples, and therefore different losses."""


class MeshError(ValueError):
    """Raised if a mesh is invalid, or lacks a requested axis or group."""


@dataclass(frozen=True, order=True)
class Cell:
    """A mesh cell: its coordinates and the rank that holds it."""

    data: int = 0
    pipeline: int = 0
    mirror: int = 0
    spatial: int = 0
    context: int = 0
    expert: int = 0
    tensor: int = 0
    rank: int = 0

    def at(self, axes: Iterable[str]) -> tuple[int, ...]:
        """Return the coordinates on these axes."""
        return tuple(getattr(self, axis) for axis in axes)


@dataclass(frozen=True)
class SubAxis:
    """A factor of an axis: a cell with coordinate c on `axis` has coordinate `(c // stride) % size` on the sub-axis."""

    axis: str
    stride: int
    size: int


class Mesh:
    """A mesh of cells, which are distributed over ranks.

    Args:
        cells: cells with distinct coordinates, on ranks numbered from 0.
        factors: for each divided axis, its sub-axes and their sizes, outermost first.  For example, `{"data":
            {"replicate": 2, "shard": 4}}` defines "data.replicate" and "data.shard".

    Raises:
        MeshError: if cells have equal coordinates, a rank has no cell, or the product of an axis's factors is not
            the size of the axis.
    """

    def __init__(self, cells: Iterable[Cell], factors: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self.cells = tuple(sorted(cells))
        self.size = 1 + max((cell.rank for cell in self.cells), default=-1)
        first: dict[tuple[int, ...], Cell] = {}
        for cell in self.cells:
            if (other := first.setdefault(cell.at(AXES), cell)) is not cell:
                where = ", ".join(f"{axis}={index}" for axis, index in zip(AXES, cell.at(AXES), strict=True))
                raise MeshError(
                    f"expected cells with distinct coordinates, got {where} on rank {other.rank} and on rank {cell.rank}"
                )
        if {cell.rank for cell in self.cells} != set(range(self.size)):
            missing = sorted(set(range(self.size)) - {cell.rank for cell in self.cells})
            raise MeshError(
                f"expected a cell for each of the {self.size} ranks, got no cell for ranks "
                f"{', '.join(map(str, missing))}"
            )
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
            raise MeshError(
                f"{axis}: expected factors whose product is {max(widths)} (the size of the axis), got {shown}"
            )
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
        """Return a mesh in which each axis has the size given in `sizes`, by default 1.

        Args:
            ranks: the number of ranks, or the ranks in the order in which they are assigned to cells (see `by_host`).
            factors: the sub-axes, as in `Mesh`.
            sizes: the size of each axis; `mirror=2` adds a reversed pipeline on the same ranks.

        Raises:
            MeshError: if the product of all sizes except `mirror` is not the number of ranks.
        """
        unknown = set(sizes) - set(AXES)
        if unknown:
            raise MeshError(f"unknown axes {', '.join(sorted(unknown))}; expected {', '.join(AXES)}")
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
        """Return a pipeline mesh with different stage sizes, such as `[{"spatial": 4}, {"tensor": 1}]`.

        With `mirror=2`, stage s of the reversed direction is on the ranks of forward stage `len(stages) - 1 - s`.  If
        these two stages have different sizes, cells are assigned to these ranks in round-robin order.

        Raises:
            MeshError: if a size is invalid, or the number of ranks does not match the stages.
        """
        order = list(range(ranks)) if isinstance(ranks, int) else list(ranks)
        if mirror not in (1, 2):
            raise MeshError(
                f"expected mirror=1, or mirror=2 for a pipeline in both directions, got mirror={mirror}"
            )
        wrong = {name: size for stage in stages for name, size in stage.items() if size < 1}
        if data < 1 or wrong:
            raise MeshError(f"expected axes of at least 1 rank, got {wrong or {'data': data}}")
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
        """The number of groups of ranks that process different tokens.

        A PyTorch training loop averages gradients over this number of groups.
        """
        return math.prod(self.width(axis, self.stages - 1) for axis in LOSS_AXES)

    @property
    def replicas(self) -> int:
        """The number of groups of ranks that process different samples."""
        return math.prod(self.width(axis, self.stages - 1) for axis in SAMPLE_AXES)

    def replica_of(self, rank: int) -> int:
        """Return the index of the group of ranks that process the same samples as `rank`."""
        cell, number = self._held[rank][0], 0
        for axis in SAMPLE_AXES:
            number = number * self.width(axis, self.stages - 1) + self.coordinate(cell, axis)
        return number

    def has_own_loss(self, rank: int) -> bool:
        """Return whether `rank` is the lowest of the ranks that compute the same loss."""
        return all(self.replica_of(other) != self.replica_of(rank) for other in range(rank))

    def of_rank(self, rank: int) -> list[Cell]:
        """Return the cells that a rank holds."""
        return self._held[rank]

    def pipeline_rank(self, rank: int) -> int:
        """Return a rank's coordinate on the pipeline axis; in a mirrored pipeline, the coordinate in direction 0."""
        return min(self._held[rank], key=lambda cell: cell.mirror).pipeline

    def width(self, axis: str, stage: int = 0) -> int:
        """Return the size of an axis, or of a sub-axis, in a stage of the pipeline."""
        if axis in self.sub_axes:
            return self.sub_axes[axis].size
        if axis == "pipeline":
            return self.stages
        return self._widths[axis, stage]

    def coordinate(self, cell: Cell, axis: str) -> int:
        """Return the coordinate of a cell on an axis or a sub-axis.

        Raises:
            MeshError: if the mesh has no such axis.
        """
        if axis in AXES:
            return int(getattr(cell, axis))
        if axis not in self.sub_axes:
            known = ", ".join((*AXES, *self.sub_axes))
            raise MeshError(f"{axis!r} is not an axis of this mesh; expected one of {known}")
        part = self.sub_axes[axis]
        return int(getattr(cell, part.axis)) // part.stride % part.size

    def others(self, axes: Sequence[str]) -> list[str]:
        """Return all axes except `axes`.

        If `axes` contains a sub-axis, its parent axis is replaced by the parent's other sub-axes.
        """
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
        """Return `cell` and all cells that differ from `cell` on these axes only, in coordinate order."""
        for axis in axes:
            self.coordinate(cell, axis)  # raises MeshError for an unknown axis
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
        """Create the groups along each set of axes in `axes`, and a group for each set of ranks in `rank_sets`.

        This is a collective call: all ranks of `comm` must pass the same arguments.  Equal sets of ranks share one
        group.
        """
        wanted = {ranks_of(self.peers(cell, *names)) for names in axes for cell in self.cells}
        wanted |= {tuple(sorted(set(ranks))) for ranks in rank_sets}
        return Groups(self, comm, sorted(wanted))

    def seed(self, seed: int, cell: Cell, *axes: str) -> int:
        """Return a seed that depends only on `seed` and on the coordinates of `cell` on these axes."""
        text = f"{seed} " + " ".join(f"{axis}={self.coordinate(cell, axis)}" for axis in sorted(axes))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")

    def generator(self, seed: int, cell: Cell, *axes: str, device: str = "cpu") -> torch.Generator:
        """Return a random number generator whose seed is `self.seed(seed, cell, *axes)`."""
        return torch.Generator(device).manual_seed(self.seed(seed, cell, *axes))


@dataclass(frozen=True)
class Group:
    """A group of cells in coordinate order, with its communicator.

    `comm` is None if one rank holds all cells.  `places[i]` is the communicator rank that holds cell i.  A
    rank may hold several cells.  In a mirrored mesh, the order of cells may differ from the order of ranks.
    """

    cells: tuple[Cell, ...]
    ranks: tuple[int, ...]
    comm: Communicator | None

    @property
    def places(self) -> list[int]:
        """The communicator rank that holds each cell, in the order of `cells`."""
        return [self.ranks.index(cell.rank) for cell in self.cells]


@dataclass
class Groups:
    """This rank's communicators in a mesh, created in the same order on all ranks."""

    mesh: Mesh
    comm: Communicator
    sets: Sequence[tuple[int, ...]]
    _made: dict[tuple[int, ...], Communicator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.comm.size != self.mesh.size:
            raise MeshError(
                f"expected a communicator of {self.mesh.size} ranks (the size of the mesh), got {self.comm.size}"
            )
        all_ranks = tuple(range(self.comm.size))
        # This cannot deadlock, because all ranks create their groups in the order of `sets`.  Consider the first
        # incomplete group in this order: none of its members is waiting for another group, so all of them create it.
        for ranks in self.sets:
            if ranks == all_ranks:
                self._made[ranks] = self.comm
            elif self.comm.rank in ranks and len(ranks) > 1:
                self._made[ranks] = self.comm.create_group(ranks)

    def of(self, cell: Cell, *axes: str) -> Group:
        """Return the group that contains `cell` and all cells that differ from `cell` on these axes only.

        This rank must hold `cell`.
        """
        cells = self.mesh.peers(cell, *axes)
        ranks = ranks_of(cells)
        return Group(cells, ranks, self.of_ranks(ranks))

    def of_ranks(self, ranks: Sequence[int]) -> Communicator | None:
        """Return the communicator for a set of ranks; None for a single rank.

        Raises:
            MeshError: if `Mesh.connect` has created no group of these ranks.
        """
        key = tuple(sorted(ranks))
        if len(key) == 1:
            return None
        if key not in self._made:
            raise MeshError(
                f"there is no group of ranks {', '.join(map(str, key))}: pass the axes of this group to Mesh.connect"
            )
        return self._made[key]


def ranks_of(cells: Iterable[Cell]) -> tuple[int, ...]:
    """Return the sorted ranks that hold these cells."""
    return tuple(sorted({cell.rank for cell in cells}))


def by_host(hosts: Sequence[str]) -> list[int]:
    """Return the ranks in an order in which ranks on the same host are adjacent.

    `hosts[r]` is the host of rank r.
    """
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
    return f"{text} needs {needed} ranks, got {ranks}; nearest: data={nearest} with {nearest * (needed // data)} ranks"
