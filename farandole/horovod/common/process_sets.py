"""Process sets: subsets of the ranks that run collective operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from farandole.horovod.common.exceptions import not_initialized

if TYPE_CHECKING:
    from farandole.horovod.engine.engine import Engine


class ProcessSet:
    """A set of ranks, to be registered by `hvd.init(process_sets=...)` or `hvd.add_process_set`, on all ranks.

        even = hvd.add_process_set(range(0, hvd.size(), 2))
        if even.included():
            hvd.allreduce(tensor, process_set=even)

    ranks: numbers in the world, without repetition; in ascending order they are the ranks of the set.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        try:
            given = list(ranks)
        except TypeError:
            raise ValueError(
                f"a ProcessSet is made from a list of ranks, not from {type(ranks).__name__}; "
                f"of an MPI communicator: comm.allgather(hvd.rank())"
            ) from None
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in given):
            raise ValueError(
                f"a ProcessSet is made from a list of ranks, which are whole numbers; given: {given}"
            )
        if len(set(given)) < len(given):
            raise ValueError(f"a ProcessSet has each rank once; given: {given}")
        self.ranks: list[int] | None = sorted(given)
        self.process_set_id: int | None = None
        self.engine: Engine | None = None
        self._world_rank = -1

    def included(self) -> bool:
        """Whether this process is in the set."""
        return self._world_rank in self._registered()

    def rank(self) -> int:
        """This process's number in the set; ValueError if it is not in it."""
        ranks = self._registered()
        if self._world_rank not in ranks:
            raise ValueError(f"rank {self._world_rank} is not in process set {self}")
        return ranks.index(self._world_rank)

    def size(self) -> int:
        """How many ranks the set has."""
        return len(self._registered())

    def register(self, number: int, ranks: list[int], world_rank: int, engine: Engine | None) -> None:
        """Called when the set comes to life; `engine` is None where this process is not in it."""
        self.process_set_id, self.ranks, self._world_rank, self.engine = number, ranks, world_rank, engine

    def invalidate(self) -> None:
        """Called when the set is removed."""
        self.process_set_id, self.ranks, self.engine = None, None, None

    def member(self) -> Engine:
        """The engine through which this process takes part; ValueError if it cannot."""
        if self.engine is not None:
            return self.engine
        self._registered()
        raise ValueError(
            f"rank {self._world_rank} cannot take part in an operation of process set {self}: it is not in it"
        )

    def _registered(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            if self is global_process_set:
                raise not_initialized()
            raise ValueError(
                f"{self} is not registered; hvd.add_process_set(...) or hvd.init(process_sets=...) does that"
            )
        return self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All ranks."""
