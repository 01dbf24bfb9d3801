"""Which algorithm for how many bytes among how many ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from farandole.comm.algorithms import doubling, rabenseifner, ring
from farandole.comm.algorithms.steps import Combine, Steps
from farandole.comm.transport import Transport

AllReduce = Callable[[Transport, Tensor, Combine], Steps]

ALL_REDUCE: dict[str, AllReduce] = {
    "ring": ring.all_reduce,
    "doubling": doubling.all_reduce,
    "rabenseifner": rabenseifner.all_reduce,
}


class Choice:
    """The algorithm that the user named, or the best one for each size."""

    def __init__(self, algorithm: str = "auto") -> None:
        self._named = None if algorithm == "auto" else ALL_REDUCE[algorithm]

    def all_reduce(self, ranks: int, size: int) -> AllReduce:
        """For `size` bytes among `ranks` ranks."""
        if self._named is not None:
            return self._named
        return doubling.all_reduce if ranks == 2 or size <= 1 << 15 else ring.all_reduce
