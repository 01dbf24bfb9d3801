"""Read the replicas of a model: each replica has separate ranks, and rank 0 drives all replicas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole.comm.communicator import Communicator
from farandole.mesh import Mesh
from farandole.serve.folder import ModelFolder
from farandole.serve.ranks.driver import LocalDriver, RemoteDriver, Worker
from farandole.serve.ranks.shards import read_sharded
from farandole.serve.runner import Runner


def read_replica(
    folder: Path, options: Mapping[str, Any], comm: Communicator, mesh: Mesh
) -> tuple[ModelFolder, list[Runner] | Worker]:
    """Read this rank's shards of a replica of the model.  This is a collective call.

    Args:
        options: the arguments of `read_model`.
        comm: the communicator of all ranks.
        mesh: a mesh with the axes "data" and "tensor"; the coordinate on "data" is the index of the replica.

    Returns:
        The model and, on rank 0, a list with the runner of each replica.  On other ranks, the second element is this
        rank's `Worker`.

    Raises:
        The errors of `read_sharded`, on all ranks.
    """
    (cell,) = mesh.of_rank(comm.rank)
    replicas, width = mesh.width("data"), mesh.width("tensor")
    if replicas > 1:
        comm.set_roles([f"replica {mesh.of_rank(rank)[0].data}" for rank in range(comm.size)])
    own = comm.split(cell.data) if replicas > 1 else comm
    assert own is not None
    found = read_sharded(folder, options, own, comm)
    if cell.data == 0:
        if comm.rank:
            return found, Worker(found.model, own, **found.runner_options)
        first = (
            Runner(found.model, **found.runner_options)
            if width == 1
            else LocalDriver(found.model, own, **found.runner_options)
        )
        return found, [first, *(RemoteDriver(_with_driver(comm, width, r)) for r in range(1, replicas))]
    both = _with_driver(comm, width, cell.data)
    return found, Worker(found.model, both, **found.runner_options, remote=True)


def _with_driver(comm: Communicator, width: int, replica: int) -> Communicator:
    """Return a communicator that contains rank 0 and the ranks of a replica."""
    return comm.create_group([0, *range(replica * width, (replica + 1) * width)])
