"""The layout of a tensor on a mesh: the elements that each cell stores, and the ranks that sum the gradient.

    qkv = Layout("0.qkv", (3 * 12, 12), shards=(("tensor", Shard(0, (Part(12, unit=4),) * 3)),))
    qkv.boxes(mesh, cell)              # the boxes of the global tensor that the cell stores: its heads of q, k and v
    norm = Layout("0.norm", (12,), same={"tensor"})                 # the gradient is the same on all ranks of the axis
    norm.reduction(mesh, piece)        # the ranks whose gradients are summed, and a coefficient per rank

Along each mesh axis, a tensor is either sharded in one dimension (`Shard`) or copied to every coordinate.  The
gradients of the copies are summed, unless the axis is in `same`.

Terms:

- A *box* is one range per dimension of the global tensor.
- A *piece* is a box that every cell holds either completely or not at all.  If boxes of different cells overlap
  partially, for example in a pipeline with stages of different widths, the boxes are cut into pieces.
- The *replica set* of a piece contains the cells that hold the piece.
- A replica set is divided into *classes*.  The gradients within a class are identical.  The gradients of different
  classes are summed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from farandole.mesh import AXES, Cell, Mesh

Box = tuple[tuple[int, int], ...]
"""A range `(start, end)` for each dimension of a global tensor."""


class LayoutError(ValueError):
    """Raised if a layout does not match the mesh; the message contains the name of the tensor and the sizes."""


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a sharded dimension, such as the rows of q in a fused projection of q, k and v.

    Each part of the dimension is sharded separately, so that every rank has rows of each part.  Each group of `unit`
    rows, such as the rows of an attention head, stays together.  Each group of `copies` consecutive ranks on the axis,
    such as the ranks that share a key-value head, holds the same chunk.
    """

    size: int
    unit: int = 1
    copies: int = 1


@dataclass(frozen=True)
class Shard:
    """Describes how a mesh axis shards dimension `dim` of a tensor.

    Each of the `parts` is sharded separately.  Without parts, all rows of the dimension form one part, which is sharded
    in multiples of `unit` rows.
    """

    dim: int
    parts: tuple[Part, ...] = ()
    unit: int = 1


@dataclass(frozen=True)
class Reduction:
    """The ranks that sum the gradient of a piece, and the coefficient of each rank in the sum.

    Each column in `columns` is a group of ranks that computes the total gradient, a weighted sum of the gradients of its
    ranks.  `weights` maps each rank to its coefficient.  Every rank that holds the piece is in exactly one column.
    Norms and checkpoints use the first column.
    """

    columns: tuple[tuple[int, ...], ...]
    weights: Mapping[int, float]

    def column_of(self, rank: int) -> int:
        """Return the index of the column that contains `rank`."""
        return next(number for number, ranks in enumerate(self.columns) if rank in ranks)


@dataclass(frozen=True)
class Layout:
    """The layout of one tensor; the `Layout` object is identical on all ranks.

    Args:
        name: the tensor's name in the unsharded model.
        shape: the tensor's shape in the unsharded model.
        stages: the pipeline stages that contain the tensor; a tied embedding is in two stages.
        shards: pairs of a mesh axis and a `Shard`, applied in this order.
        same: the axes along which copies have identical gradients, such as the tensor axis for normalization weights.
    """

    name: str
    shape: tuple[int, ...]
    stages: frozenset[int] = frozenset({0})
    shards: tuple[tuple[str, Shard], ...] = ()
    same: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        """Check the dimensions."""
        for axis, shard in self.shards:
            if not -len(self.shape) <= shard.dim < len(self.shape):
                raise LayoutError(
                    f"{self.name}: expected axis {axis!r} to shard a dimension of a {len(self.shape)}-D tensor, got "
                    f"dimension {shard.dim} (counted from 0); choose another dimension"
                )

    def cells(self, mesh: Mesh) -> list[Cell]:
        """Return the cells that store the tensor or a shard of it."""
        return [cell for cell in mesh.cells if cell.pipeline in self.stages]

    def boxes(self, mesh: Mesh, cell: Cell) -> tuple[Box, ...]:
        """Return the boxes of the global tensor that a cell stores.

        The cell's tensor is the concatenation of these boxes along the sharded dimensions.
        """
        return self._boxes(
            tuple((mesh.width(axis, cell.pipeline), mesh.coordinate(cell, axis)) for axis, _ in self.shards)
        )

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - layouts are small, and many cells have the same places
    def _boxes(self, places: tuple[tuple[int, int], ...]) -> tuple[Box, ...]:
        boxes: list[Box] = [tuple((0, length) for length in self.shape)]
        for (axis, shard), (width, place) in zip(self.shards, places, strict=True):
            dim = shard.dim % len(self.shape)
            boxes = [each for box in boxes for each in self._cut(box, axis, shard, dim, width, place)]
        return tuple(boxes)

    def _cut(self, box: Box, axis: str, shard: Shard, dim: int, width: int, place: int) -> Iterator[Box]:
        at, end = box[dim]
        parts = shard.parts or (Part(end - at, shard.unit),)
        if sum(part.size for part in parts) != end - at:
            raise LayoutError(
                f"{self.name}: expected parts with {end - at} rows in total (the size of dimension {dim}), got "
                f"{sum(part.size for part in parts)}; correct the sizes of the parts"
            )
        for part in parts:
            copies = min(part.copies, width)
            if width % copies:
                raise LayoutError(
                    f"{self.name}: expected the size of axis {axis!r} to be a multiple of {copies} (the number of "
                    f"copies of a part), got {width}"
                )
            start, stop = chunk(part.size, width // copies, place // copies, part.unit)
            yield (*box[:dim], (at + start, at + stop), *box[dim + 1 :])
            at += part.size

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - layouts are small, and there are few meshes
    def pieces(self, mesh: Mesh) -> tuple[Box, ...]:
        """Return the non-empty pieces of the tensor, sorted."""
        if not self.shards:
            whole = tuple((0, length) for length in self.shape)
            return (whole,) if volume(whole) else ()
        boxes = {box for cell in self.cells(mesh) for box in self.boxes(mesh, cell) if volume(box)}
        if any(_overlap(a, b) for a, b in itertools.combinations(boxes, 2)):
            cuts = [sorted({end for box in boxes for end in box[dim]}) for dim in range(len(self.shape))]
            boxes = {piece for box in boxes for piece in _grid(box, cuts)}
        return tuple(sorted(boxes))

    def replicas(self, mesh: Mesh, piece: Box) -> tuple[Cell, ...]:
        """Return the cells that hold a piece."""
        return tuple(
            cell for cell in self.cells(mesh) if any(contains(box, piece) for box in self.boxes(mesh, cell))
        )

    def classes(self, mesh: Mesh, piece: Box) -> dict[tuple[int, ...], list[Cell]]:
        """Return the cells that hold a piece, grouped by class.

        Each key contains the mesh coordinates that all cells of the class have in common.
        """
        axes = mesh.others(sorted(self.same))
        found: dict[tuple[int, ...], list[Cell]] = defaultdict(list)
        for cell in self.replicas(mesh, piece):
            found[tuple(mesh.coordinate(cell, axis) for axis in axes)].append(cell)
        return dict(found)

    def reduction(self, mesh: Mesh, piece: Box) -> Reduction:
        """Return the ranks that sum a piece's gradient, and the coefficient of each rank's gradient in the sum.

        A rank can have several cells of the replica set.  These cells share one tensor, whose gradient is the sum over
        the cells.  In the total gradient, each class counts exactly once.  In the simplest case, each column contains
        one rank per class, and all coefficients are 1.

        Raises:
            LayoutError: if no coefficients count each class exactly once.
        """
        if not self.shards:  # independent of name and shape, so tensors share the cached result
            return _reduction(Layout("", (), self.stages, (), self.same), mesh, ())
        return _reduction(self, mesh, piece)


@functools.lru_cache(maxsize=65536)
def _reduction(layout: Layout, mesh: Mesh, piece: Box) -> Reduction:
    same = sorted(layout.same & set(AXES))
    # by rank: the number of cells of each class
    held: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
    first: dict[int, tuple[int, ...]] = {}
    classes = layout.classes(mesh, piece)
    for key, cells in classes.items():
        for cell in cells:
            held[cell.rank][key] += 1
            place = cell.at(same)
            first[cell.rank] = min(first.get(cell.rank, place), place)
    alike: dict[frozenset[tuple[tuple[int, ...], int]], list[int]] = defaultdict(list)
    for rank in sorted(held, key=lambda rank: (first[rank], rank)):
        alike[frozenset(held[rank].items())].append(rank)
    holders = tuple(sorted(held))
    if sum(count for signature in alike for _, count in signature) == len(classes):  # each class occurs once
        if len({len(ranks) for ranks in alike.values()}) == 1:
            columns = tuple(tuple(sorted(column)) for column in zip(*alike.values(), strict=True))
            return Reduction(columns, dict.fromkeys(holders, 1.0))
        weights = {rank: 1 / len(ranks) for ranks in alike.values() for rank in ranks}
        return Reduction((holders,), weights)
    counts = np.array([[held[rank][key] for rank in holders] for key in sorted(classes)], float)
    solution, *_ = np.linalg.lstsq(counts, np.ones(len(counts)), rcond=None)
    if not np.allclose(counts @ solution, 1):
        raise LayoutError(
            f"{layout.name}: ranks {', '.join(map(str, holders))} hold copies of {piece}, and no weighted sum of their "
            "gradients counts each copy exactly once; assign the pipeline stages of the mesh to other ranks"
        )
    return Reduction((holders,), dict(zip(holders, map(float, solution), strict=True)))


# ---- ranges and boxes ----


def chunk(length: int, parts: int, number: int, unit: int = 1) -> tuple[int, int]:
    """Split `length` elements into `parts` ranges, and return the range with index `number`.

    The ranges consist of complete units.  Their lengths are as equal as possible, and longer ranges come first.
    """
    if length % unit:
        raise LayoutError(f"expected a multiple of {unit} elements, got {length}; choose another unit")
    least, longer = divmod(length // unit, parts)
    start = number * least + min(number, longer)
    return start * unit, (start + least + (number < longer)) * unit


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(end - start for start, end in box)


def contains(outer: Box, inner: Box) -> bool:
    """Return whether `outer` contains `inner`."""
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def _overlap(a: Box, b: Box) -> bool:
    return all(max(p, r) < min(q, s) for (p, q), (r, s) in zip(a, b, strict=True))


def _grid(box: Box, cuts: Sequence[Sequence[int]]) -> Iterator[Box]:
    """Cut a box at the positions in `cuts`, one list per dimension, and yield the resulting boxes."""
    ranges = [
        [(a, b) for a, b in itertools.pairwise(ends) if start <= a and b <= end]
        for (start, end), ends in zip(box, cuts, strict=True)
    ]
    return itertools.product(*ranges)


def boxes_of_range(box: Box, start: int, end: int) -> list[Box]:
    """Return boxes that cover elements `start` to `end` (exclusive) of a flattened box, in order.

    For n dimensions there are at most 2n - 1 boxes.
    """
    if start >= end:
        return []
    if len(box) <= 1:
        return [tuple((first + start, first + end) for first, _ in box)]
    (first, _), rest = box[0], box[1:]
    row = volume(rest)
    head, tail = start // row, (end - 1) // row
    if head == tail:
        return _in_row(first + head, boxes_of_range(rest, start - head * row, end - head * row))
    found: list[Box] = []
    if start % row:
        found += _in_row(first + head, boxes_of_range(rest, start % row, row))
        head += 1
    whole = tail if end % row else tail + 1
    if head < whole:
        found.append(((first + head, first + whole), *rest))
    if end % row:
        found += _in_row(first + tail, boxes_of_range(rest, 0, end % row))
    return found


def _in_row(row: int, boxes: Sequence[Box]) -> list[Box]:
    return [((row, row + 1), *box) for box in boxes]
