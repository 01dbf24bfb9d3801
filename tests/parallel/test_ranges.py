"""Parts of tensors under random layouts: a checkpoint contains every element once, and loads under other layouts."""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from farandole.layout import Layout, Part, Shard
from farandole.mesh import Mesh
from farandole.parallel.checkpoint.ranges import Range, TensorBoxes
from farandole.parallel.checkpoint.storage import SavePlanner, read_state

AXES = ("expert", "tensor", "context")
NAME = "weight"


@st.composite
def _layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Mesh, Layout]:
    """Draw a mesh of at most 18 ranks, and a layout that shards up to two dimensions, in one or several parts."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in draw(st.permutations(AXES))[:2]}
    mesh = Mesh.box(2 * sizes[min(sizes)] * sizes[max(sizes)], data=2, **sizes)
    shards = []
    for axis, dim in zip(sizes, draw(st.permutations(range(len(shape)))), strict=False):
        parts = ()
        if draw(st.booleans()):
            unit = draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
            cuts = sorted(draw(st.lists(st.integers(0, shape[dim] // unit), max_size=2)))
            ends = [0, *(unit * cut for cut in cuts), shape[dim]]
            parts = tuple(Part(b - a, unit) for a, b in itertools.pairwise(ends))
        shards.append((axis, Shard(dim, parts)))
    return mesh, Layout(NAME, shape, shards=tuple(shards))


@st.composite
def _divided(draw: st.DrawFn, mesh: Mesh, layout: Layout) -> list[Range | None]:
    """Divide each rank's part of an empty tensor among the ranks that have the same part, at random elements."""
    alike = defaultdict(list)
    for cell in mesh.cells:
        alike[layout.boxes(mesh, cell)].append(cell.rank)
    found: list[Range | None] = [None] * mesh.size
    for boxes, ranks in alike.items():
        local = _part(torch.empty(layout.shape, dtype=torch.int32), layout, boxes)
        place = TensorBoxes.of_boxes(layout.shape, local.shape, boxes)
        copies = draw(st.integers(1, len(ranks)))  # as with hybrid sharding
        shards = [ranks[first::copies] for first in range(copies)]
        cuts = st.lists(st.integers(0, local.numel()), min_size=len(shards[0]), max_size=len(shards[0]))
        ends = [0, *sorted(draw(cuts))[1:], local.numel()]
        for members in shards:
            for rank, (start, end) in zip(members, itertools.pairwise(ends), strict=False):
                if start < end:
                    found[rank] = Range.of(torch.full((end - start,), -1, dtype=torch.int32), start, place)
    return found


def _part(whole: Tensor, layout: Layout, boxes: Any) -> Tensor:
    """Return the boxes of a tensor, concatenated along each dimension."""
    for dim in range(whole.dim()):
        index = [torch.arange(*ends) for ends in dict.fromkeys(box[dim] for box in boxes)]
        whole = whole.index_select(dim, torch.cat(index))
    return whole


def _elements(whole: Tensor, mesh: Mesh, layout: Layout, ranges: list[Range | None]) -> list[Tensor]:
    """Return the elements that each range must have."""
    parts = [_part(whole, layout, layout.boxes(mesh, mesh.of_rank(rank)[0])) for rank in range(mesh.size)]
    return [
        part.reshape(-1)[own.start : own.start + own.length] if own else part.reshape(-1)[:0]
        for part, own in zip(parts, ranges, strict=True)
    ]


def _save(folder: Path, ranges: list[Range | None]) -> int:
    """Save as `torch.distributed.checkpoint.save` does, in one process for all ranks; return the bytes written."""
    writer, planners = FileSystemWriter(folder, sync_files=False), [SavePlanner() for _ in ranges]
    for rank, (planner, own) in enumerate(zip(planners, ranges, strict=True)):
        state = {} if own is None else {NAME: own}
        planner.set_up_planner(state, writer.storage_meta(), is_coordinator=rank == 0)
    writer.set_up_storage_writer(is_coordinator=True)
    local = [writer.prepare_local_plan(planner.create_local_plan()) for planner in planners]
    plans, metadata = planners[0].create_global_plan(local)
    written = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, plan in zip(planners, writer.prepare_global_plan(plans), strict=True)
    ]
    writer.finish(metadata, written)
    return sum(planner.nbytes for planner in planners)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_element_is_written_once_and_read_back_under_other_layouts(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    mesh, layout = data.draw(_layouts(shape))
    saved = data.draw(_divided(mesh, layout))
    for own, values in zip(saved, _elements(whole, mesh, layout, saved), strict=True):
        if own is not None:
            own.values.copy_(values)
            for box, part in own.boxes():
                assert torch.equal(part, whole[tuple(slice(*ends) for ends in box)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "state"
        assert _save(folder, saved) == whole.nbytes
        complete = {NAME: torch.full(shape, -1, dtype=torch.int32)}
        dcp.load(complete, storage_reader=FileSystemReader(folder), no_dist=True)
        assert torch.equal(complete[NAME], whole)
        other_mesh, other = data.draw(_layouts(shape))
        loaded = data.draw(_divided(other_mesh, other))
        for own, values in zip(loaded, _elements(whole, other_mesh, other, loaded), strict=True):
            if own is not None:
                read_state(folder, {NAME: own})
                assert torch.equal(own.values, values)
