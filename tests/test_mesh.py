"""Compare meshes with groups written by hand, and layouts with sums computed element by element."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm.communicator import Communicator
from farandole.layout import (
    Box,
    Layout,
    LayoutError,
    Part,
    Shard,
    boxes_of_range,
    chunk,
    contains,
    volume,
)
from farandole.mesh import AXES, Cell, Mesh, MeshError, by_host, ranks_of

# ---- meshes ----


def _groups(mesh: Mesh, *axes: str) -> set[tuple[int, ...]]:
    return {ranks_of(mesh.peers(cell, *axes)) for cell in mesh.cells}


def test_a_box_has_one_cell_per_rank() -> None:
    mesh = Mesh.box(8, data=2, pipeline=2, tensor=2)
    assert _groups(mesh, "tensor") == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert _groups(mesh, "pipeline") == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert _groups(mesh, "data") == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert _groups(mesh, "data", "tensor") == {(0, 1, 4, 5), (2, 3, 6, 7)}
    assert _groups(mesh) == {(rank,) for rank in range(8)}
    assert (mesh.width("tensor"), mesh.width("pipeline"), mesh.stages) == (2, 2, 2)


def test_sub_axes() -> None:
    mesh = Mesh.box(8, data=4, tensor=2, factors={"data": {"hosts": 2, "local": 2}})
    assert _groups(mesh, "data.local") == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert _groups(mesh, "data.hosts") == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert _groups(mesh, "data.hosts", "data.local") == _groups(mesh, "data")
    assert _groups(mesh, "data.local", "tensor") == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert mesh.width("data.local") == 2
    with pytest.raises(
        MeshError, match=r"'data\.rack' is not an axis of this mesh; expected one of .*data\.hosts"
    ):
        mesh.peers(mesh.cells[0], "data.rack")
    with pytest.raises(MeshError, match="whose product is 4 .the size of the axis., got hosts=2 x local=3"):
        Mesh.box(4, data=4, factors={"data": {"hosts": 2, "local": 3}})


def test_stages_of_different_widths() -> None:
    mesh = Mesh.of_stages(10, [{"spatial": 4}, {}], data=2)
    assert _groups(mesh, "spatial") == {(0, 1, 2, 3), (4,), (5, 6, 7, 8), (9,)}
    assert _groups(mesh, "data") == {(rank, rank + 5) for rank in range(5)}
    assert _groups(mesh, "data", "spatial") == {(0, 1, 2, 3, 5, 6, 7, 8), (4, 9)}
    assert (mesh.width("spatial", 0), mesh.width("spatial", 1)) == (4, 1)


def test_a_mirrored_pipeline() -> None:
    mesh = Mesh.box(3, pipeline=3, mirror=2)
    assert [[(c.pipeline, c.mirror) for c in mesh.of_rank(rank)] for rank in range(3)] == [
        [(0, 0), (2, 1)],
        [(1, 0), (1, 1)],
        [(0, 1), (2, 0)],
    ]
    assert _groups(mesh, "mirror") == {(0, 2), (1,)}
    assert _groups(mesh, "pipeline") == {(0, 1, 2)}
    wide = Mesh.of_stages(5, [{"spatial": 4}, {}], mirror=2)
    assert ranks_of(c for c in wide.cells if (c.pipeline, c.mirror) == (0, 1)) == (4,)
    assert ranks_of(c for c in wide.cells if (c.pipeline, c.mirror) == (1, 1)) == (0,)


def test_ranks_of_a_host_are_adjacent() -> None:
    order = by_host(["b", "a", "b", "a"])
    assert order == [0, 2, 1, 3]
    mesh = Mesh.box(order, data=2, tensor=2)
    assert _groups(mesh, "tensor") == {(0, 2), (1, 3)}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Mesh.box(6, data=2, tensor=2), r"data=2 x tensor=2 needs 4 ranks, got 6; nearest: data=3 with 6"),
        (lambda: Mesh.box(3, tensor=4), r"tensor=4 needs 4 ranks, got 3; nearest: data=1 with 4 ranks"),
        (lambda: Mesh.of_stages(4, [{"spatial": 4}, {}]), r"stages of 4, 1 ranks needs 5 ranks, got 4"),
        (lambda: Mesh.box(4, tensors=4), "unknown axes tensors; expected data, pipeline"),
        (lambda: Mesh.box(4, tensor=0), "at least 1 rank, got {'tensor': 0}"),
        (lambda: Mesh.box(4, pipeline=4, mirror=3), "expected mirror=1, or mirror=2 .*, got mirror=3"),
        (lambda: Mesh([Cell(rank=0), Cell(rank=1)]), "got .* on rank 0 and on rank"),
        (lambda: Mesh([Cell(rank=0), Cell(data=1, rank=2)]), "a cell for each of the 3 ranks"),
    ],
)  # fmt: skip
def test_an_invalid_mesh_is_an_error(make: Any, says: str) -> None:
    with pytest.raises(MeshError, match=says):
        make()


def test_seeds_depend_on_the_given_axes_only() -> None:
    mesh = Mesh.box(8, data=2, context=2, tensor=2)
    for axes in itertools.chain.from_iterable(itertools.combinations(AXES, n) for n in range(3)):
        by_seed = defaultdict(set)
        for cell in mesh.cells:
            by_seed[mesh.seed(5, cell, *axes)].add(cell.at(axes))
        assert all(len(places) == 1 for places in by_seed.values())
        assert len(by_seed) == len({cell.at(axes) for cell in mesh.cells})
    a, b = (torch.randn(3, generator=mesh.generator(5, cell, "data")) for cell in mesh.cells[:2])
    assert torch.equal(a, b)


def _communicate(rank: int, size: int) -> None:
    assert dist.group.WORLD is not None
    comm = Communicator(dist.group.WORLD)
    mesh = Mesh.box(4, pipeline=2, mirror=2, tensor=2)
    groups = mesh.connect(
        comm, [("tensor",), ("mirror",), ("mirror", "tensor"), ("pipeline", "tensor")], [(0, 3)]
    )
    for cell in mesh.of_rank(rank):
        for axes in (("tensor",), ("mirror",), ("mirror", "tensor")):
            group = groups.of(cell, *axes)
            assert group.ranks == ranks_of(mesh.peers(cell, *axes))
            assert [group.ranks[place] for place in group.places] == [c.rank for c in group.cells]
            value = torch.tensor([float(rank)])
            assert group.comm is not None
            group.comm.all_reduce(value)
            assert value == sum(group.ranks)
    assert groups.of(mesh.of_rank(rank)[0], "pipeline", "tensor").comm is comm
    assert (groups.of_ranks([rank]) is None) and (rank in (1, 2) or groups.of_ranks([3, 0]) is not None)
    with pytest.raises(MeshError, match="there is no group of ranks"):
        groups.of_ranks([0, 1, 2])
    with pytest.raises(MeshError, match="expected a communicator of 2 ranks .*, got 4"):
        Mesh.box(2, tensor=2).connect(comm)


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_groups_of_a_mesh(ranks: Any, backend: str) -> None:
    ranks(4, backend).run(_communicate)


# ---- layouts ----


def test_a_tied_embedding_is_on_two_stages() -> None:
    mesh = Mesh.box(4, pipeline=2, tensor=2)
    embedding = Layout("tokens", (13, 4), frozenset({0, 1}), (("tensor", Shard(0)),))
    assert embedding.pieces(mesh) == (((0, 7), (0, 4)), ((7, 13), (0, 4)))
    for number, piece in enumerate(embedding.pieces(mesh)):
        reduction = embedding.reduction(mesh, piece)
        assert reduction.columns == ((number, number + 2),)
        assert set(reduction.weights.values()) == {1.0}


def test_a_norm_under_tensor_and_sequence_parallelism() -> None:
    mesh = Mesh.box(4, data=2, tensor=2)
    whole: Box = ((0, 8),)
    same = Layout("norm", (8,), same=frozenset({"tensor"})).reduction(mesh, whole)
    assert same.columns == ((0, 2), (1, 3))
    assert (same.column_of(2), same.column_of(3)) == (0, 1)
    assert Layout("norm", (8,)).reduction(mesh, whole).columns == ((0, 1, 2, 3),)


def test_the_middle_rank_of_a_mirrored_pipeline_counts_once() -> None:
    mesh = Mesh.box(3, pipeline=3, mirror=2)
    middle = Layout("1.weight", (4,), frozenset({1})).reduction(mesh, ((0, 4),))
    assert (middle.columns, dict(middle.weights)) == (((1,),), {1: 1.0})
    outer = Layout("0.weight", (4,), frozenset({0})).reduction(mesh, ((0, 4),))
    assert outer.columns == ((0, 2),)


def test_a_norm_tied_between_stages_of_different_widths() -> None:
    mesh = Mesh.of_stages(3, [{"tensor": 2}, {}])
    tied = Layout("norm", (4,), frozenset({0, 1}), same=frozenset({"tensor"})).reduction(mesh, ((0, 4),))
    assert tied.columns == ((0, 1, 2),)
    assert dict(tied.weights) == {0: 0.5, 1: 0.5, 2: 1.0}
    rows = Layout("tokens", (6, 2), frozenset({0, 1}), (("tensor", Shard(0)),))
    assert [rows.reduction(mesh, piece).columns for piece in rows.pieces(mesh)] == [((0, 2),), ((1, 2),)]


def test_fused_projections_are_cut_at_heads() -> None:
    mesh = Mesh.box(4, tensor=4)
    # 6 query heads and 2 key-value heads of 2 rows: 2 ranks share each key-value head
    layout = Layout(
        "qkv", (20, 3), shards=(("tensor", Shard(0, (Part(12, 2), Part(4, 2, 2), Part(4, 2, 2)))),)
    )
    rows = [[box[0] for box in layout.boxes(mesh, cell)] for cell in mesh.cells]
    assert rows[0] == [(0, 4), (12, 14), (16, 18)]
    assert rows[1] == [(4, 8), (12, 14), (16, 18)]
    assert rows[3] == [(10, 12), (14, 16), (18, 20)]
    keys = layout.reduction(mesh, ((12, 14), (0, 3)))
    assert keys.columns == ((0, 1),)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (lambda: Layout("w", (4,), shards=(("tensor", Shard(1)),)), r"w: expected axis 'tensor' to shard a dimension of a 1-D tensor, got dimension 1 .counted from 0."),
        (lambda: Layout("w", (4,), shards=(("tensor", Shard(0, (Part(3),))),)), "w: expected parts with 4 rows in total .the size of dimension 0., got 3"),
        (lambda: Layout("w", (4,), shards=(("tensor", Shard(0, (), 3)),)), "expected a multiple of 3 elements, got 4"),
        (lambda: Layout("w", (4,), shards=(("tensor", Shard(0, (Part(4, 1, 2),))),)), r"expected the size of axis 'tensor' to be a multiple of 2 .the number of copies of a part., got 3"),
    ],
)  # fmt: skip
def test_an_invalid_layout_is_an_error(layout: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        layout().pieces(Mesh.box(3, tensor=3))


@st.composite
def _meshes(draw: st.DrawFn) -> Mesh:
    """Draw boxes, stages of different widths and mirrored pipelines, of at most 24 ranks."""
    data = draw(st.integers(1, 3))
    stages = [
        {"tensor": draw(st.integers(1, 3)), "context": draw(st.integers(1, 2))}
        for _ in range(draw(st.integers(1, 3)))
    ]
    if draw(st.booleans()):
        stages = [stages[0]] * len(stages)
    ranks = data * sum(math.prod(stage.values()) for stage in stages)
    mirror = draw(st.sampled_from([1, 2]))
    return Mesh.of_stages(draw(st.permutations(range(ranks))), stages, data=data, mirror=mirror)


@st.composite
def _layouts(draw: st.DrawFn, mesh: Mesh) -> Layout:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    stages = draw(st.sets(st.integers(0, mesh.stages - 1), min_size=1))
    shards = []
    for axis in draw(st.sets(st.sampled_from(["tensor", "context"]))):
        dim = draw(st.integers(0, len(shape) - 1))
        if all(other.dim != dim for _, other in shards):
            cut = draw(st.integers(0, shape[dim]))
            parts = tuple(Part(size) for size in (cut, shape[dim] - cut) if size)
            shards.append((axis, Shard(dim, draw(st.sampled_from([(), parts])))))
    same = draw(
        st.sets(st.sampled_from(sorted({"tensor", "context"} - {axis for axis, _ in shards})))
        if len(shards) < 2
        else st.just(set())
    )
    return Layout("weight", shape, frozenset(stages), tuple(shards), frozenset(same))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_gradient_counts_once(data: st.DataObject) -> None:
    """For each element, each column sums every class once, and every rank that stores the element is in a column."""
    mesh = data.draw(_meshes())
    layout = data.draw(_layouts(mesh))
    random = np.random.default_rng(0)
    stored: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for cell in layout.cells(mesh):
        boxes = layout.boxes(mesh, cell)
        elements = [e for box in boxes for e in itertools.product(*(range(*ends) for ends in box))]
        assert len(set(elements)) == len(elements)
        for element in elements:
            stored[cell.rank][element] += 1
    pieces = layout.pieces(mesh)
    covered = [e for piece in pieces for e in itertools.product(*(range(*ends) for ends in piece))]
    assert len(covered) == len(set(covered))
    assert set(covered) == {element for elements in stored.values() for element in elements}
    for piece in pieces:
        for cell in layout.cells(mesh):  # a cell holds a piece whole or not at all
            inside = [contains(box, piece) for box in layout.boxes(mesh, cell)]
            assert sum(inside) <= 1
        classes = layout.classes(mesh, piece)
        try:
            reduction = layout.reduction(mesh, piece)
        except LayoutError:
            assert any(cell.mirror for cell in mesh.cells)  # without a mirror each copy can count once
            continue
        gradients = {key: random.standard_normal() for key in classes}
        held: dict[int, float] = defaultdict(float)
        for key, cells in classes.items():
            for cell in cells:
                held[cell.rank] += gradients[key]
        assert sorted(itertools.chain(*reduction.columns)) == sorted(held)
        for column in reduction.columns:
            total = sum(held[rank] * reduction.weights[rank] for rank in column)
            assert total == pytest.approx(sum(gradients.values()))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_range_of_a_box_consists_of_few_boxes(data: st.DataObject) -> None:
    box = tuple(
        (start, start + length)
        for start, length in data.draw(
            st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=4)
        )
    )
    start = data.draw(st.integers(0, volume(box)))
    end = data.draw(st.integers(start, volume(box)))
    boxes = boxes_of_range(box, start, end)
    assert len(boxes) <= 2 * len(box) - 1
    order = list(itertools.product(*(range(*ends) for ends in box)))
    found = [element for each in boxes for element in itertools.product(*(range(*ends) for ends in each))]
    assert found == order[start:end]


@given(length=st.integers(0, 60), parts=st.integers(1, 9), unit=st.integers(1, 4))
def test_chunks_are_even(length: int, parts: int, unit: int) -> None:
    ranges = [chunk(length * unit, parts, number, unit) for number in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length * unit
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= unit
    assert all(size % unit == 0 for size in sizes)
