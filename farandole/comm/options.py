"""What a user can choose about a group of the backend: `init_process_group("farandole", pg_options=Options(...))`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

Transports = Literal["tcp", "gloo"]
Algorithms = Literal["auto", "ring", "doubling", "rabenseifner"]


@dataclass(frozen=True)
class Options:
    """How a group on several hosts communicates; a group on one host has no need of it."""

    leaders: int | None = None
    """How many ranks of a host lead, each its share of a tensor; by default as many as the smallest host has."""
    transport: Transports = "tcp"
    """What carries messages between leaders."""
    algorithm: Algorithms = "auto"
    """How leaders reduce; `auto` takes what was measured to be fastest for the size."""
    interface: str | None = None
    """The network interface to use; by default the one named in GLOO_SOCKET_IFNAME, torch's own variable, or
    else the one through which the store of the job is reached."""

    def __post_init__(self) -> None:
        for name, kind in (("transport", Transports), ("algorithm", Algorithms)):
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")
        if self.leaders is not None and self.leaders < 1:
            raise ValueError(f"leaders={self.leaders}: at least one rank of a host leads")

    @classmethod
    def of(cls, given: Any) -> Options:
        """What the user gave, or the defaults; TypeError if it is something else."""
        if given is not None and not isinstance(given, cls):
            raise TypeError(
                f"the backend takes farandole.comm.Options as pg_options, found {type(given).__name__}"
            )
        options = given or cls()
        if options.interface is None and (named := os.environ.get("GLOO_SOCKET_IFNAME")):
            options = cls(options.leaders, options.transport, options.algorithm, named)
        return options
