"""Read and write states in PyTorch's distributed checkpoint format.

Importing `torch.distributed.checkpoint` takes two seconds, so other modules import this module only inside
functions that read or write a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from farandole.parallel.checkpoint.ranges import Range


class SavePlanner(DefaultSavePlanner):
    """A save planner that supports `Range` values in addition to tensors."""

    nbytes = 0
    """The number of bytes that this rank writes, known once the plan is final."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Accept this rank's final plan, and count its bytes."""
        for data in (item.tensor_data for item in new_plan.items):
            if data is not None:
                self.nbytes += data.chunk.sizes.numel() * data.properties.dtype.itemsize
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor to write under `index`."""
        found = self.state_dict[index.fqn]
        return found.part(index.offset or ()) if isinstance(found, Range) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """A load planner that supports `Range` values in addition to tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Store the arguments; unlike torch's planner, accept values of any type."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the destination tensor for `index`."""
        found = self.state_dict[index.fqn]
        return found.part(index.offset or ()) if isinstance(found, Range) else super().lookup_tensor(index)


def write_state(
    folder: Path,
    state: Mapping[str, Any],
    group: dist.ProcessGroup,
    planner: SavePlanner | None = None,
) -> None:
    """Write the ranges and tensors in `state` to checkpoint `folder`, and flush its files to disk.

    This is a collective call on `group`.
    """
    writer = FileSystemWriter(folder, sync_files=True)
    dcp.save(dict(state), storage_writer=writer, planner=planner or SavePlanner(), process_group=group)


def load_state(folder: Path, state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Read values from checkpoint `folder` into the ranges and tensors in `state`.

    This is a collective call on `group`.
    """
    reader = FileSystemReader(folder)
    dcp.load(dict(state), storage_reader=reader, planner=LoadPlanner(), process_group=group)


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of checkpoint `folder`."""
    return FileSystemReader(folder).read_metadata()


def tensors_in(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of a checkpoint's tensors, by name."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def read_state(folder: Path, state: dict[str, Any], metadata: Metadata | None = None) -> None:
    """Read values from checkpoint `folder` into the ranges and tensors in `state`.

    This is not a collective call.

    Args:
        metadata: the checkpoint's metadata, if the caller has already read it.
    """
    # not `dcp.load`, which warns if ranks load different tensors
    reader, planner = FileSystemReader(folder), LoadPlanner()
    metadata = metadata or reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    [plan] = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    [plan] = reader.prepare_global_plan([plan])
    reader.read_data(planner.finish_plan(plan), planner).wait()
