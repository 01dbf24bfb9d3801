"""Which algorithm for how many bytes among how many hosts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from farandole.comm.algorithms import doubling, rabenseifner, ring
from farandole.comm.algorithms.steps import Combine, Steps
from farandole.comm.algorithms.table import Table
from farandole.comm.transport import Transport

AllReduce = Callable[[Transport, Tensor, Combine], Steps]

ALL_REDUCE: dict[str, AllReduce] = {
    "ring": ring.all_reduce,
    "doubling": doubling.all_reduce,
    "rabenseifner": rabenseifner.all_reduce,
}


class Choice:
    """The algorithm that the user named, or the best one for each size by a table of measurements."""

    def __init__(self, algorithm: str = "auto", table: Table | None = None) -> None:
        self._named = None if algorithm == "auto" else ALL_REDUCE[algorithm]
        self._table = table or Table.default()
        self._chosen: dict[tuple[int, int], AllReduce] = {}

    def all_reduce(self, ranks: int, size: int) -> AllReduce:
        """For `size` bytes among `ranks` ranks; sizes between two powers of two have the same."""
        if self._named is not None:
            return self._named
        key = ranks, size.bit_length()
        chosen = self._chosen.get(key)
        if chosen is None:
            name = self._table.best(ranks, 1 << max(0, size.bit_length() - 1)) if ranks > 1 else "ring"
            chosen = self._chosen[key] = ALL_REDUCE[name]
        return chosen
