"""Selection of the algorithm of an operation: named by the user, or the fastest according to measurements."""

from __future__ import annotations

import logging
from collections.abc import Callable

from farandole.comm.algorithms import doubling, rabenseifner, ring
from farandole.comm.algorithms.steps import Steps
from farandole.comm.algorithms.table import Table

AllReduce = Callable[..., Steps]
"""An all-reduce with the arguments of `ring.all_reduce`."""

ALL_REDUCE: dict[str, AllReduce] = {
    "ring": ring.all_reduce,
    "doubling": doubling.all_reduce,
    "rabenseifner": rabenseifner.all_reduce,
}

AGGREGATED_BYTES = 1 << 13
AGGREGATED_RANKS = 8
"""Smaller messages are aggregated per pair of hosts if the larger host has at least AGGREGATED_RANKS ranks.

Measured with two hosts on one machine, for an all-to-all with 8 and 16 ranks per host: direct messages of 1 KiB take
1.1 and 1.5 times as long as aggregated messages.  With messages of 16 KiB both take equally long.  With fewer ranks
direct messages are faster.
"""

log = logging.getLogger(__name__)


class Choice:
    """Chooses the algorithms of a group on several hosts.

    The logger `farandole.comm.algorithms.choice` reports every choice once at level DEBUG.

    Args:
        algorithm: The name of an all-reduce, or "auto" for the fastest one for each size according to `table`.
        table: Measurements; by default the package's.
        exchange: "aggregated" or "direct" messages of all-to-all, gather and scatter; "auto" decides by size.
    """

    def __init__(self, algorithm: str = "auto", table: Table | None = None, exchange: str = "auto") -> None:
        self._algorithm, self._exchange = algorithm, exchange
        self._table = table or Table.default()
        self._chosen: dict[tuple[int, int], str] = {}
        self._reported: set[tuple[str, str, int]] = set()

    def all_reduce(self, hosts: int, size: int) -> str:
        """Return the name of the all-reduce for `size` bytes among `hosts` hosts, a key of `ALL_REDUCE`.

        All sizes between two adjacent powers of two share one algorithm.
        """
        if self._algorithm != "auto":
            return self._report("all_reduce", self._algorithm, size)
        key = hosts, size.bit_length()
        name = self._chosen.get(key)
        if name is None:
            name = self._table.best(hosts, 1 << max(0, size.bit_length() - 1)) if hosts > 1 else "ring"
            self._chosen[key] = name
        return self._report("all_reduce", name, size)

    def exchange(self, operation: str, size: int, ranks: int) -> str:
        """Return "aggregated" or "direct" for messages of `size` bytes between hosts with at most `ranks` ranks each."""
        name = self._exchange
        if name == "auto":
            aggregates = size <= AGGREGATED_BYTES and ranks >= AGGREGATED_RANKS
            name = "aggregated" if aggregates else "direct"
        return self._report(operation, name, size)

    def _report(self, operation: str, name: str, size: int) -> str:
        key = operation, name, size.bit_length()
        if key not in self._reported:
            self._reported.add(key)
            log.debug("%s of about %d bytes between hosts: %s", operation, size, name)
        return name
