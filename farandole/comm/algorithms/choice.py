"""Selection of algorithms: either named by the user, or the fastest according to measurements."""

from __future__ import annotations

import logging
from collections.abc import Callable

from farandole.comm.algorithms import doubling, rabenseifner, ring
from farandole.comm.algorithms.steps import Steps
from farandole.comm.algorithms.table import Table

AllReduce = Callable[..., Steps]
"""An all-reduce with the same arguments as `ring.all_reduce`."""

ALL_REDUCE: dict[str, AllReduce] = {
    "ring": ring.all_reduce,
    "doubling": doubling.all_reduce,
    "rabenseifner": rabenseifner.all_reduce,
}

AGGREGATED_BYTES = 1 << 13
AGGREGATED_RANKS = 8
"""Messages up to AGGREGATED_BYTES are aggregated per pair of hosts if a host has at least AGGREGATED_RANKS ranks.

Measured for an all-to-all between two hosts on one machine: with 1 KiB messages, direct messages take 1.1 times as long
as aggregated messages for 8 ranks per host, and 1.5 times as long for 16 ranks.  With 16 KiB messages both take equally
long.  With fewer ranks, direct messages are faster.
"""

log = logging.getLogger(__name__)


class Choice:
    """Chooses the algorithms of collectives in a group that spans several hosts.

    The logger `farandole.comm.algorithms.choice` reports each choice once at level DEBUG.

    Args:
        algorithm: The name of an all-reduce algorithm, or "auto" for the fastest at each size according to `table`.
        table: The measurements; by default the package's table.
        exchange: "aggregated" or "direct" messages for all-to-all, gather and scatter; "auto" decides by size.
    """

    def __init__(self, algorithm: str = "auto", table: Table | None = None, exchange: str = "auto") -> None:
        self._algorithm, self._exchange = algorithm, exchange
        self._table = table or Table.default()
        self._chosen: dict[tuple[int, int], str] = {}
        self._reported: set[tuple[str, str, int]] = set()

    def all_reduce(self, hosts: int, size: int) -> str:
        """Return the key in `ALL_REDUCE` for the all-reduce of `size` bytes among `hosts` hosts.

        All sizes between two adjacent powers of two use the same algorithm.
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
        """Return "aggregated" or "direct" for `size`-byte messages between hosts with up to `ranks` ranks."""
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
