"""Group options: `init_process_group("farandole", pg_options=Options(...))`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from farandole.comm.algorithms.table import Table

Transports = Literal["tcp", "gloo", "mpi", "nccl"]
Algorithms = Literal["auto", "ring", "doubling", "rabenseifner"]
Exchanges = Literal["auto", "aggregated", "direct"]


@dataclass(frozen=True)
class Options:
    """Options for communication between hosts; a group on one host ignores them.

    Raises:
        ValueError: if an option is invalid, or has no effect in combination with another option.
    """

    leaders: int | None = None
    """The number of ranks per host that communicate with other hosts (leaders); by default the number of ranks on the
    smallest host."""
    transport: Transports = "tcp"
    """The transport for messages between leaders; `nccl` copies messages through each leader's CUDA device."""
    algorithm: Algorithms = "auto"
    """The all-reduce algorithm between leaders; `auto` selects the fastest algorithm in `table` for each size."""
    exchange: Exchanges = "auto"
    """How all-to-all, gather and scatter send messages between hosts: `aggregated` sends one message per pair of hosts,
    `direct` sends one message per pair of ranks, and `auto` aggregates small messages."""
    table: str | None = None
    """The table of measurements for `auto`: a file written by `farandole tune --output`, equal on all hosts; by default
    the package's table."""
    interface: str | None = None
    """The network interface.  The default is torch's environment variable GLOO_SOCKET_IFNAME if it is set, else the
    interface that reaches the job's store."""

    def __post_init__(self) -> None:
        kinds = {"transport": Transports, "algorithm": Algorithms, "exchange": Exchanges}
        for name, kind in kinds.items():
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")
        if self.leaders is not None and self.leaders < 1:
            raise ValueError(f"leaders: expected at least 1, got {self.leaders}")
        if self.table is not None:
            if self.algorithm != "auto":
                raise ValueError(
                    f"table={self.table!r} has no effect with algorithm={self.algorithm!r}; omit one of them"
                )
            self.measurements()

    @classmethod
    def of(cls, given: Any) -> Options:
        """Return `given`, or the default options if `given` is None; raise TypeError for other types.

        The environment variable GLOO_SOCKET_IFNAME, if set, provides the default for `interface`.
        """
        if given is not None and not isinstance(given, cls):
            raise TypeError(f"pg_options: expected farandole.comm.Options, got {type(given).__name__}")
        options = given or cls()
        if options.interface is None and (named := os.environ.get("GLOO_SOCKET_IFNAME")):
            options = replace(options, interface=named)
        return options

    def measurements(self) -> Table:
        """Return the table of measurements for `auto`; raise `TableError` if the file is invalid."""
        return Table.default() if self.table is None else Table.read(self.table)
