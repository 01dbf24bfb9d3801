"""Choose the algorithms for collectives: the user's choice, or else the fastest measured algorithms."""

from __future__ import annotations

import logging
from collections.abc import Callable

from farandole.comm.algorithms import doubling, rabenseifner, ring
from farandole.comm.algorithms.steps import Steps
from farandole.comm.algorithms.table import Table

AllReduce = Callable[..., Steps]
"""An all-reduce algorithm; its arguments are those of `ring.all_reduce`."""

ALL_REDUCE: dict[str, AllReduce] = {
    "ring": ring.all_reduce,
    "doubling": doubling.all_reduce,
    "rabenseifner": rabenseifner.all_reduce,
}

AGGREGATED_BYTES = 1 << 13
AGGREGATED_RANKS = 8
"""Small messages are aggregated if a host has at least this number of ranks.

Small messages have at most AGGREGATED_BYTES bytes.  Aggregation combines all messages between a pair of hosts into one.

These measurements are for an all-to-all between two simulated hosts on one machine.  With messages of 1 KiB, direct
messages take 1.1 times as long as aggregated messages for 8 ranks per host, and 1.5 times as long for 16 ranks.  With
messages of 16 KiB, both take the same time.  With fewer ranks, direct messages are faster.
"""

log = logging.getLogger(__name__)


class Choice:
    """Chooses the algorithms for collectives in a group that spans several hosts.

    The logger `farandole.comm.algorithms.choice` reports each choice once at level DEBUG.

    Args:
        algorithm: The name of an all-reduce algorithm, or "auto" to choose the fastest algorithm in `table` for each
            size.
        table: The measurements of the algorithms; by default, the table that is part of this package.
        exchange: How all-to-all, gather and scatter send messages between hosts: "aggregated", "direct", or "auto" to
            choose based on the message size and the number of ranks.
    """

    def __init__(self, algorithm: str = "auto", table: Table | None = None, exchange: str = "auto") -> None:
        self._algorithm, self._exchange = algorithm, exchange
        self._table = table or Table.default()
        self._chosen: dict[tuple[int, int], str] = {}
        self._reported: set[tuple[str, str, int]] = set()

    def all_reduce(self, hosts: int, size: int) -> str:
        """Return the algorithm for an all-reduce of `size` bytes among `hosts` hosts, as a key of `ALL_REDUCE`.

        The algorithm is chosen for `size` rounded down to a power of two.
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
        """Return how to send the messages of `operation` between hosts: "aggregated" or "direct".

        Args:
            operation: The name of the collective, for the log.
            size: The size of a message in bytes.
            ranks: The largest number of ranks on a host.
        """
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
