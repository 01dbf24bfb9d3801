"""Where a process stands among the ranks of its job, as the job's launcher says it.

A launcher (torchrun, mpirun, srun, our own) tells each process its rank through environment variables,
each in its own words.  `environments/` translates them, one small file per launcher, into a `Placement`;
from there on nobody asks who launched the job.  Nothing here imports torch or touches the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class LaunchError(RuntimeError):
    """The ranks of a job cannot be started, or cannot find each other; the message says what to change."""


@dataclass(frozen=True)
class TorchVariables:
    """The ranks meet as torch's own do: at MASTER_ADDR and MASTER_PORT, with torchrun's store."""


@dataclass(frozen=True)
class Address:
    """The ranks meet at a TCP port that rank 0 opens on `host`."""

    host: str
    port: int


@dataclass(frozen=True)
class SameHost:
    """The ranks share a host and meet under a name that only this `job` has there."""

    job: str


@dataclass(frozen=True)
class NoMeeting:
    """The ranks span hosts and nothing says where to meet; `advice` tells the user what to set."""

    advice: str


Meeting = TorchVariables | Address | SameHost | NoMeeting


@dataclass(frozen=True)
class Placement:
    """One rank's place: `rank` of `size` in the world, `local_rank` of `local_size` on its host.

    The local numbers are None where the launcher does not tell them; the ranks then find them out
    among themselves once they have met.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    meeting: Meeting


ALONE = Placement("alone", rank=0, size=1, local_rank=0, local_size=1, meeting=SameHost("alone"))


def read_placement(
    environ: Mapping[str, str],
    launcher: str,
    meeting: Meeting,
    *,
    rank: str,
    size: str,
    local_rank: str | None = None,
    local_size: str | None = None,
) -> Placement:
    """Build a placement from variables of the given names; `rank` and `size` must be there.

    Raises `LaunchError` where a variable is missing or not a number, or where the numbers contradict
    each other.
    """
    found = Placement(
        launcher,
        rank=_required(environ, launcher, rank, beside=size),
        size=_required(environ, launcher, size, beside=rank),
        local_rank=_optional(environ, launcher, local_rank),
        local_size=_optional(environ, launcher, local_size),
        meeting=meeting,
    )
    _check_range(launcher, "rank", found.rank, found.size, f"{rank}={found.rank}, {size}={found.size}")
    if found.local_rank is not None and found.local_size is not None:
        words = f"{local_rank}={found.local_rank}, {local_size}={found.local_size}"
        _check_range(launcher, "local rank", found.local_rank, found.local_size, words)
    if found.local_size is not None and found.local_size > found.size:
        raise LaunchError(
            f"{launcher} says that this host has {found.local_size} of the job's {found.size} ranks "
            f"({local_size}={found.local_size}, {size}={found.size}); a host cannot have more than all"
        )
    return found


def chosen_address(environ: Mapping[str, str], launcher: str) -> Address | None:
    """The meeting point that the user chose with MASTER_ADDR and MASTER_PORT, or None."""
    names = ("MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if environ.get(name)]
    if not given:
        return None
    if len(given) == 1:
        missing = names[1 - names.index(given[0])]
        raise LaunchError(
            f"{given[0]}={environ[given[0]]} is set and {missing} is not, under {launcher}; "
            f"set both, or neither where all ranks share a host"
        )
    return Address(environ["MASTER_ADDR"], _required(environ, launcher, "MASTER_PORT", beside="MASTER_ADDR"))


def _check_range(launcher: str, what: str, number: int, count: int, words: str) -> None:
    if count < 1:
        raise LaunchError(f"{launcher} started a job of {count} ranks ({words}); a job has at least 1")
    if not 0 <= number < count:
        raise LaunchError(
            f"{launcher} gave this process {what} {number} of {count} ({words}); "
            f"{what}s of {count} go from 0 to {count - 1}"
        )


def _required(environ: Mapping[str, str], launcher: str, name: str, beside: str) -> int:
    number = _optional(environ, launcher, name)
    if number is None:
        there = f"{beside}={environ[beside]} is set" if beside in environ else f"{beside} is not set either"
        raise LaunchError(
            f"this looks like a rank of {launcher}, but {name} is not set ({there}); "
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
        raise LaunchError(f"{name}={text!r}, as {launcher} set it, is not a whole number") from None
