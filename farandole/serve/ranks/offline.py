"""The ranks of `farandole.LLM`: this process alone, processes that it starts, or the ranks of a job.

Between two calls to `LLM.generate`, the other ranks wait outside all collectives, because the next call may come hours
later.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farandole.comm.communicator import Communicator
from farandole.launch.environments import find_placement
from farandole.launch.placement import ALONE, LaunchError
from farandole.launch.runtime import init
from farandole.launch.workers import Link, Workers
from farandole.serve.folder import ModelFolder, read_model
from farandole.serve.ranks.driver import LocalDriver, Worker
from farandole.serve.ranks.errors import RanksFailed
from farandole.serve.ranks.shards import check_width, raised_together, read_sharded
from farandole.serve.request import RequestError
from farandole.serve.runner import Runner


def ranks_for(tensor: int) -> Ranks:
    """Return the ranks for a model with `tensor` tensor-parallel ranks.

    Raises:
        RequestError: if a launcher has started a different number of ranks.
    """
    if tensor < 1:
        raise RequestError("tensor", f"expected at least 1 rank, got {tensor}")
    if tensor == 1:
        return Ranks()
    placement = find_placement(os.environ)
    if placement is ALONE:
        return StartedRanks(tensor)
    if placement.size != tensor:
        raise RequestError(
            "tensor",
            f"expected 1 or {placement.size} (the number of ranks that {placement.launcher} started), got {tensor}",
        )
    return JobRanks(init().comm)


class Ranks:
    """A single process, without other ranks; the base class of `StartedRanks` and `JobRanks`."""

    rank = 0

    def read(self, folder: Path, **options: Any) -> ModelFolder:
        """Read a model, or this rank's shards; see `read_model` for the arguments."""
        return read_model(folder, **options)

    def runner(self, found: ModelFolder) -> Runner | None:
        """Return the runner of rank 0; None on other ranks."""
        return Runner(found.model, **found.runner_options)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context manager that makes the other ranks run each step together with rank 0."""
        yield

    def share(self, value: Any) -> None:
        """Send `value` from rank 0 to the other ranks of a job.  The other ranks must call `receive`."""

    def receive(self) -> Any:
        """Run steps together with rank 0 until rank 0 calls `share`, and return the shared value."""
        raise NotImplementedError("rank 0 does not receive values")

    def close(self) -> None:
        """Stop the other ranks."""


class StartedRanks(Ranks):
    """This process and the processes that it starts, which exit when this process exits.

    Args:
        ranks: the number of ranks, including this process.
    """

    def __init__(self, ranks: int) -> None:
        self._count = ranks
        self._workers: Workers | None = None

    def read(self, folder: Path, **options: Any) -> ModelFolder:
        """Start the processes, and read the shards of rank 0; each process reads its own shards."""
        check_width(read_model(folder, **options, lazy=True).model, self._count)
        self._workers = Workers("farandole.serve.ranks.offline", self._count, f"the ranks of {folder}")
        try:
            self._comm = self._workers.join()
            self._comm.broadcast_object((folder, options))
            return read_sharded(folder, options, self._comm)
        except BaseException:
            self.close()
            raise

    def runner(self, found: ModelFolder) -> Runner:
        """Return the runner of rank 0."""
        self._driver = LocalDriver(found.model, self._comm, **found.runner_options)
        return self._driver

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context manager that makes the processes run each step together with rank 0.

        A failed or interrupted step ends the processes.
        """
        try:
            self._wake()
            yield
            self._driver.pause()
        except BaseException:
            self.close()
            raise

    def _wake(self) -> None:
        if self._workers is None:
            raise RanksFailed("the ranks have ended; create the LLM again")
        try:
            self._workers.resume()
        except LaunchError as error:
            raise RanksFailed(str(error)) from None

    def close(self) -> None:
        """Stop the processes."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class JobRanks(Ranks):
    """The ranks of a job, which all run the same program.

    Args:
        comm: the communicator of all ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.rank = comm, comm.rank

    def read(self, folder: Path, **options: Any) -> ModelFolder:
        """Read this rank's shards."""
        with raised_together(self._comm):
            if self.rank == 0:
                check_width(read_model(folder, **options, lazy=True).model, self._comm.size)
        return read_sharded(folder, options, self._comm)

    def runner(self, found: ModelFolder) -> Runner | None:
        """Return the runner of rank 0; None on other ranks."""
        if self.rank:
            self._worker = Worker(found.model, self._comm, **found.runner_options)
            return None
        self._driver = LocalDriver(found.model, self._comm, **found.runner_options)
        return self._driver

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context manager that makes the other ranks run each step together with rank 0.

        All other ranks must call `receive` or `close`.
        """
        yield
        self._driver.pause()

    def share(self, value: Any) -> None:
        """Send `value` to the other ranks."""
        self._comm.broadcast_object(value)

    def receive(self) -> Any:
        """Run steps together with rank 0 until rank 0 calls `share`, and return the shared value.

        Raises:
            RanksFailed: if rank 0 closes the LLM.
        """
        if not self._worker.follow():
            raise RanksFailed("rank 0 has closed the LLM")
        return self._comm.broadcast_object(None)

    def close(self) -> None:
        """On rank 0, stop the other ranks; on other ranks, run rank 0's steps until rank 0 calls this method."""
        if self.rank == 0:
            self._driver.close()
            return
        while self._worker.follow():
            self._comm.broadcast_object(None)


def main(descriptor: str) -> None:
    """Run one of the processes that `StartedRanks` starts."""
    link = Link(descriptor)
    comm = link.join()
    folder, options = comm.broadcast_object(None)
    found = read_sharded(folder, options, comm)
    worker = Worker(found.model, comm, **found.runner_options)
    for _ in link.waits():
        worker.follow()


if __name__ == "__main__":
    main(sys.argv[1])
