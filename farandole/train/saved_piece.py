"""A part of a flattened tensor, as torch's distributed checkpointing saves and loads it.

Every parameter, and every state of its optimizer, is saved as the flat tensor that it is in memory, in as many
parts as ranks have of it.  Who loads names the parts it wants, and gets them from whatever parts there are: so
a checkpoint of any number of ranks and any stage of ZeRO is one of every other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Piece:
    """Elements `start` and following of a flat tensor of `count` elements.

    torch knows it by its two methods (`torch.distributed._checkpointable`) and the planners below.
    """

    start: int
    count: int

    @property
    def values(self) -> Tensor:
        """The elements, flat."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """How many elements."""
        return self.values.numel()

    @property
    def nbytes(self) -> int:
        """The size of the elements."""
        return self.values.nbytes

    def size(self) -> torch.Size:
        """The shape of the whole."""
        return torch.Size([self.count])

    def properties(self) -> TensorProperties:
        """What torch notes of the elements besides their place."""
        return TensorProperties.create_from_tensor(self.values)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        chunk = self._chunk()
        data = TensorWriteData(chunk, self.properties(), self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.length]))


@dataclass(frozen=True)
class SavedPiece(Piece):
    """A piece that is in memory."""

    held: Tensor
    start: int
    count: int

    @property
    def values(self) -> Tensor:
        """The elements, flat."""
        return self.held


@dataclass(frozen=True)
class StoredPiece(Piece):
    """A piece of `numel` elements of type `dtype` that `load` brings when it is written."""

    load: Callable[[], Tensor]
    dtype: torch.dtype
    numel: int
    start: int
    count: int

    @property
    def values(self) -> Tensor:
        """The elements, flat; valid until those of another piece are asked for."""
        return self.load()

    @property
    def length(self) -> int:
        """How many elements."""
        return self.numel

    @property
    def nbytes(self) -> int:
        """The size of the elements."""
        return self.numel * self.dtype.itemsize

    def properties(self) -> TensorProperties:
        """What torch notes of the elements besides their place."""
        return TensorProperties(dtype=self.dtype)


class PieceSavePlanner(DefaultSavePlanner):
    """Plans a save of pieces and of ordinary tensors, by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is to be written under `index`."""
        found = self.state_dict[index.fqn]
        return found.values if isinstance(found, Piece) else super().lookup_object(index)


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans to load pieces and ordinary tensors, by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state as it is: torch's own way forgets values of types that it does not know."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where to put what was saved under `index`."""
        found = self.state_dict[index.fqn]
        return found.values if isinstance(found, Piece) else super().lookup_tensor(index)
