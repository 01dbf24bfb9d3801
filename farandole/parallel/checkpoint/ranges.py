"""Describe the elements of global tensors that a rank stores, for PyTorch's distributed checkpoint format.

A rank's tensor consists of one or more boxes (rectangular blocks) of a global tensor (`TensorBoxes`).  The rank stores
all elements of its flattened tensor or, with ZeRO, some consecutive elements (`Range`).  PyTorch saves these elements
as boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farandole.layout import Box, boxes_of_range, volume

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True)
class TensorBoxes:
    """The position of a rank's tensor in a global tensor of shape `shape`.

    `local` is the shape of the rank's tensor.  `regions` contains pairs: a box in the rank's tensor and
    the corresponding box in the global tensor.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    regions: tuple[tuple[Box, Box], ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> TensorBoxes:
        """Return the `TensorBoxes` of a tensor that is complete on this rank."""
        box = _box_of(shape)
        return TensorBoxes(tuple(shape), tuple(shape), ((box, box),))

    @staticmethod
    def of_boxes(shape: Sequence[int], local: Sequence[int], boxes: Sequence[Box]) -> TensorBoxes:
        """Return the `TensorBoxes` of a local tensor that concatenates `boxes` of the global tensor.

        The boxes are concatenated along the dimensions in which they differ.
        """
        firsts: list[dict[tuple[int, int], int]] = [{} for _ in shape]
        for box in boxes:
            for first, ends in zip(firsts, box, strict=True):
                if ends not in first:
                    first[ends] = sum(end - start for start, end in first)
        regions = tuple(
            (tuple((f[e], f[e] + e[1] - e[0]) for f, e in zip(firsts, box, strict=True)), box)
            for box in boxes
        )
        return TensorBoxes(tuple(shape), tuple(local), regions)

    @property
    def is_whole(self) -> bool:
        """Return whether the tensor is complete on this rank."""
        return self.local == self.shape and len(self.regions) == 1


def _box_of(shape: Sequence[int]) -> Box:
    return tuple((0, length) for length in shape)


@dataclass(frozen=True)
class Range:
    """Consecutive elements of a rank's flattened tensor, beginning with element `start`.

    PyTorch saves the elements as boxes of the global tensor, through the protocol in
    `torch.distributed._checkpointable` and the planners in `storage`.  `load` reads the elements if they are not
    `held` in memory.  The result of `load` is valid until the next call.
    """

    place: TensorBoxes
    start: int
    length: int
    dtype: torch.dtype
    held: Tensor | None = None
    load: Callable[[], Tensor] | None = None

    @staticmethod
    def of(values: Tensor, start: int, place: TensorBoxes) -> Range:
        """Return a range for `values`, which are in memory."""
        flat = values.detach().reshape(-1)
        return Range(place, start, flat.numel(), flat.dtype, held=flat)

    @property
    def values(self) -> Tensor:
        """The flat elements."""
        if self.held is not None:
            return self.held
        assert self.load is not None
        return self.load()

    @property
    def nbytes(self) -> int:
        """Return the total size of the elements in bytes."""
        return self.length * self.dtype.itemsize

    def part(self, offsets: Sequence[int]) -> Tensor:
        """Return the elements of the box that begins at `offsets` in the global tensor."""
        for box, elements in self.boxes():
            if tuple(start for start, _ in box) == tuple(offsets):
                return elements
        raise KeyError(f"expected the offsets of a box in this range, got {tuple(offsets)}")

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Yield (box, elements) for each box of the global tensor that this range covers."""
        for box, first, local, slices in self._boxes():
            elements = self.values[first : first + volume(local)]
            yield box, elements.view([end - start for start, end in local])[slices]

    def _boxes(self) -> Iterator[tuple[Box, int, Box, tuple[slice, ...]]]:
        """Yield (global box, first, local box, slices) for each box of the global tensor that this range covers.

        The local box begins at element `first` of the range.  `slices` selects the elements of the global box in the local box.
        """
        if 0 in self.place.shape:
            # one box without elements, so that the tensor has an entry in the checkpoint
            whole = _box_of(self.place.shape)
            yield whole, 0, whole, tuple(slice(start, end) for start, end in whole)
            return
        first = 0
        for local in boxes_of_range(_box_of(self.place.local), self.start, self.start + self.length):
            for region, stored in self.place.regions:
                common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(local, region, strict=True))
                if any(start >= end for start, end in common):
                    continue
                shifts = [there - here for (here, _), (there, _) in zip(region, stored, strict=True)]
                box = tuple((s + shift, e + shift) for (s, e), shift in zip(common, shifts, strict=True))
                # the elements of the global box in the local box
                slices = tuple(slice(s - at, e - at) for (s, e), (at, _) in zip(common, local, strict=True))
                yield box, first, local, slices
            first += volume(local)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(
                torch.Size([start for start, _ in box]), torch.Size([end - start for start, end in box])
            )
            for box, *_ in self._boxes()
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.place.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]
