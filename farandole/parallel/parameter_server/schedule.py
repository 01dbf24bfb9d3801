"""Decide, for each mode, when gradients are applied and when a worker may continue.

A worker's clock is the number of gradients that the worker has pushed.  A worker is active until it finishes or is
lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from farandole.parallel.parameter_server.layout import Buffers


@dataclass(frozen=True)
class Contribution:
    """The gradients of one worker.

    Args:
        has: for each piece of the parameters, whether the worker has a gradient.
        gradients: the buffers with the gradients of all pieces.
        weight: the weight of this worker in the mean.
    """

    has: list[bool]
    gradients: Buffers
    weight: float


Apply = Callable[[list[Contribution]], None]
"""A function that runs one step of the optimizer with the weighted mean of contributions."""


class Schedule(ABC):
    """Counts the gradients of each worker, and decides when the optimizer steps and which workers must wait."""

    def __init__(self, workers: Iterable[int], apply: Apply) -> None:
        self._clocks = dict.fromkeys(workers, 0)
        self._active = set(self._clocks)
        self._apply = apply

    def lead(self, worker: int) -> int:
        """Return the number of gradients by which a worker is ahead of the slowest active worker."""
        own = self._clocks[worker]
        return own - min((self._clocks[active] for active in self._active), default=own)

    def leave(self, worker: int) -> None:
        """Mark a worker as finished or lost, so that other workers do not wait for it."""
        self._active.discard(worker)

    @abstractmethod
    def push(self, worker: int, contribution: Contribution) -> None:
        """Register the gradients of a worker after all of them have arrived."""

    @abstractmethod
    def may_pull(self, worker: int) -> bool:
        """Return whether a worker may receive parameters now."""


class Synchronous(Schedule):
    """Applies the mean gradient after all active workers have pushed; then all workers may pull parameters."""

    def __init__(self, workers: Iterable[int], apply: Apply) -> None:
        super().__init__(workers, apply)
        self._round: dict[int, Contribution] = {}

    def push(self, worker: int, contribution: Contribution) -> None:
        """Register a worker's gradient, and apply the mean gradient if all active workers have pushed."""
        self._clocks[worker] += 1
        self._round[worker] = contribution
        self._end_round()

    def leave(self, worker: int) -> None:
        """Mark a worker as finished or lost, and apply the mean gradient if all other workers have pushed."""
        super().leave(worker)
        self._end_round()

    def may_pull(self, worker: int) -> bool:
        """Return whether the worker's last gradient has been applied."""
        return worker not in self._round

    def _end_round(self) -> None:
        if self._round and self._active <= self._round.keys():
            # in a fixed order, so that every run gives the same bits
            self._apply([self._round[worker] for worker in sorted(self._round)])
            self._round = {}


class Asynchronous(Schedule):
    """Applies each gradient on arrival.

    A worker may pull only if it is at most `staleness` gradients ahead of the slowest active worker.
    """

    def __init__(self, workers: Iterable[int], apply: Apply, staleness: int | None) -> None:
        super().__init__(workers, apply)
        self._staleness = staleness

    def push(self, worker: int, contribution: Contribution) -> None:
        """Apply a gradient immediately."""
        self._clocks[worker] += 1
        self._apply([contribution])

    def may_pull(self, worker: int) -> bool:
        """Return whether the worker is within the staleness bound."""
        return self._staleness is None or self.lead(worker) <= self._staleness
