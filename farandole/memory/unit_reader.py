"""What is kept of an offloaded optimizer's pieces, one unit in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

from farandole.memory.offloaded_optimizer import OffloadedOptimizer, PieceState


class UnitReader:
    """Brings units of `optimizer`, between two of its steps; those that come in order are read ahead."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer
        self._visit: Iterator[tuple[int, list[PieceState]]] | None = None
        self._unit = -1
        self._states: list[PieceState] = []

    def states(self, unit: int) -> list[PieceState]:
        """The states of the pieces of `unit`, valid until another one is asked for."""
        if unit != self._unit:
            if self._visit is None or unit != self._unit + 1:
                self.close()
                self._visit = self._optimizer.saved(unit)
            self._unit, self._states = next(self._visit)
        return self._states

    def close(self) -> None:
        """Give back the buffer that holds the last unit; another one may still be asked for."""
        if self._visit is not None:
            self._visit.close()  # type: ignore[attr-defined]
        self._visit, self._unit, self._states = None, -1, []
