"""The rank of a process in its job, and the rendezvous of the ranks.

Each launcher (torchrun, mpirun, srun, `farandole launch`) uses different environment variables for a process's rank.
`environments.py` reads these variables into a `Placement`.  This module does not import torch or use the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class LaunchError(RuntimeError):
    """Raised if the ranks of a job cannot start or connect to each other; the message suggests a solution."""


@dataclass(frozen=True)
class TorchVariables:
    """Rendezvous through torch's store at MASTER_ADDR and MASTER_PORT."""


@dataclass(frozen=True)
class Address:
    """Rendezvous at a TCP port that rank 0 opens on `host`."""

    host: str
    port: int


@dataclass(frozen=True)
class SameHost:
    """Rendezvous of ranks on the same host under the name `job`, which is unique on that host."""

    job: str


@dataclass(frozen=True)
class NoRendezvous:
    """The ranks are on several hosts, but no environment variable specifies a rendezvous.

    `advice` suggests variables to set.
    """

    advice: str


Rendezvous = TorchVariables | Address | SameHost | NoRendezvous


@dataclass(frozen=True)
class Placement:
    """One rank: `rank` of `size` in the world, `local_rank` of `local_size` on its host.

    `local_rank` and `local_size` are None if the launcher does not provide these values.  The ranks then exchange host
    names to compute them.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    rendezvous: Rendezvous


ALONE = Placement("alone", rank=0, size=1, local_rank=0, local_size=1, rendezvous=SameHost("alone"))


def read_placement(
    environ: Mapping[str, str],
    launcher: str,
    rendezvous: Rendezvous,
    rank: str,
    size: str,
    local_rank: str | None = None,
    local_size: str | None = None,
) -> Placement:
    """Build a placement from environment variables.

    The arguments `rank`, `size`, `local_rank` and `local_size` are the names of the variables.

    Raises:
        LaunchError: if `rank` or `size` is missing, a variable is not a number, or the numbers contradict each other.
    """
    found = Placement(
        launcher,
        rank=_required(environ, launcher, rank, other=size),
        size=_required(environ, launcher, size, other=rank),
        local_rank=_optional(environ, launcher, local_rank),
        local_size=_optional(environ, launcher, local_size),
        rendezvous=rendezvous,
    )
    _check_range(launcher, "rank", found.rank, found.size, f"{rank}={found.rank}, {size}={found.size}")
    if found.local_rank is not None and found.local_size is not None:
        variables = f"{local_rank}={found.local_rank}, {local_size}={found.local_size}"
        _check_range(launcher, "local rank", found.local_rank, found.local_size, variables)
    if found.local_size is not None and found.local_size > found.size:
        raise LaunchError(
            f"{launcher} reports {found.local_size} ranks on this host, but only {found.size} in the job "
            f"({local_size}={found.local_size}, {size}={found.size}); correct these environment variables"
        )
    return found


def master_address(environ: Mapping[str, str], launcher: str) -> Address | None:
    """Return the address that the user set with MASTER_ADDR and MASTER_PORT, or None if neither variable is set."""
    names = ("MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if environ.get(name)]
    if not given:
        return None
    if len(given) == 1:
        missing = names[1 - names.index(given[0])]
        raise LaunchError(
            f"{given[0]}={environ[given[0]]} is set, but {missing} is not (launcher: {launcher}); "
            f"set both, or neither if all ranks share a host"
        )
    return Address(environ["MASTER_ADDR"], _required(environ, launcher, "MASTER_PORT", other="MASTER_ADDR"))


def _check_range(launcher: str, what: str, number: int, count: int, variables: str) -> None:
    if count < 1:
        raise LaunchError(f"{launcher} started a job of {count} ranks ({variables}); expected at least 1")
    if not 0 <= number < count:
        raise LaunchError(
            f"{launcher} set {what} {number} of {count} ({variables}); "
            f"expected a {what} from 0 to {count - 1}"
        )


def _required(environ: Mapping[str, str], launcher: str, name: str, other: str) -> int:
    number = _optional(environ, launcher, name)
    if number is None:
        found = f"{other}={environ[other]} is set" if other in environ else f"{other} is not set either"
        raise LaunchError(
            f"this process seems to be a rank started by {launcher}, but {name} is not set ({found}); "
            f"set both to join a job, or unset both to run alone"
        )
    return number


def _optional(environ: Mapping[str, str], launcher: str, name: str | None) -> int | None:
    text = environ.get(name, "") if name is not None else ""
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{launcher} set {name}={text!r}; expected an integer") from None
