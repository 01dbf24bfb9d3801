"""Define process sets: subsets of ranks for collective operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.horovod.engine import Engine

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class ProcessSet:
    """A subset of ranks for collective operations.

    Before a set is used, all ranks in Horovod's world must register the set with `hvd.init(process_sets=...)` or
    `hvd.add_process_set`.  This includes the ranks that are not in the set.

        even = hvd.add_process_set(range(0, hvd.size(), 2))
        if even.included():
            hvd.allreduce(tensor, process_set=even)

    Args:
        ranks: Distinct ranks in Horovod's world, in any order.

    Raises:
        ValueError: if `ranks` does not consist of distinct integers.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        try:
            given = list(ranks)
        except TypeError:
            raise ValueError(
                f"expected a list of ranks, got {type(ranks).__name__}; "
                f"for an MPI communicator, pass comm.allgather(hvd.rank())"
            ) from None
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in given):
            raise ValueError(f"expected a list of integer ranks, got {given}")
        if len(set(given)) < len(given):
            raise ValueError(f"expected a list of distinct ranks, got {given}")
        self.ranks: list[int] | None = sorted(given)
        self.process_set_id: int | None = None
        self.engine: Engine | None = None
        self._world_rank = -1

    def included(self) -> bool:
        """Return whether this process is in the set."""
        return self._world_rank in self._registered()

    def rank(self) -> int:
        """Return this process's rank in the set.

        Raises:
            ValueError: if the set is not registered, or this process is not in the set.
        """
        ranks = self._registered()
        if self._world_rank not in ranks:
            raise ValueError(
                f"rank {self._world_rank} is not in process set {self}; check process_set.included() first"
            )
        return ranks.index(self._world_rank)

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self._registered())

    def register(self, number: int, ranks: list[int], world_rank: int, engine: Engine | None) -> None:
        """Mark the set as registered.

        Args:
            number: The id of the set.
            ranks: The ranks in the set, in ascending order.
            world_rank: This process's rank in Horovod's world.
            engine: The engine that runs the set's operations, or None if this process is not in the set.
        """
        self.process_set_id, self.ranks, self._world_rank, self.engine = number, ranks, world_rank, engine

    def invalidate(self) -> None:
        """Mark the set as unregistered, and clear its ranks and its engine."""
        self.process_set_id, self.ranks, self.engine = None, None, None

    def member(self) -> Engine:
        """Return this process's engine for the set.

        Raises:
            ValueError: if the set is not registered, or this process is not in the set.
        """
        if self.engine is not None:
            return self.engine
        self._registered()
        raise ValueError(
            f"rank {self._world_rank} is not in process set {self} and cannot run its operations; "
            f"check process_set.included() first"
        )

    def _registered(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            if self is global_process_set:
                raise ValueError(NOT_INITIALIZED)
            raise ValueError(
                f"{self} is not registered; register it with hvd.add_process_set(...) or hvd.init(process_sets=...)"
            )
        return self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""The process set with all ranks in Horovod's world.  `hvd.init` registers this set."""
