"""What a user can choose about a group of the backend: `init_process_group("farandole", pg_options=Options(...))`."""

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
    """How a group on several hosts communicates; a group on one host has no need of it."""

    leaders: int | None = None
    """How many ranks of a host lead, each its share of a tensor; by default as many as the smallest host has."""
    transport: Transports = "tcp"
    """What carries messages between leaders; `nccl` copies them through each leader's CUDA device."""
    algorithm: Algorithms = "auto"
    """How leaders all-reduce; `auto` takes what was measured to be fastest for the size."""
    exchange: Exchanges = "auto"
    """Messages of all-to-all, gather and scatter between hosts: `aggregated`, one for each pair of hosts, or `direct`, one
    for each pair of ranks; `auto` aggregates small ones."""
    table: str | None = None
    """The file of measurements by which `auto` decides, as `farandole tune --output` writes it, with the same content
    on all hosts; by default the package's own."""
    interface: str | None = None
    """The network interface to use; by default the one named in GLOO_SOCKET_IFNAME, torch's own variable, or
    else the one through which the store of the job is reached."""

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
        """What the user gave, or the defaults; TypeError if it is something else."""
        if given is not None and not isinstance(given, cls):
            raise TypeError(f"pg_options: expected farandole.comm.Options, got {type(given).__name__}")
        options = given or cls()
        if options.interface is None and (named := os.environ.get("GLOO_SOCKET_IFNAME")):
            options = replace(options, interface=named)
        return options

    def measurements(self) -> Table:
        """The table by which `auto` decides; `TableError`, a `ValueError`, if the file is none."""
        return Table.default() if self.table is None else Table.read(self.table)
