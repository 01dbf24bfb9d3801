"""The hosts of a job, as people name them (`a:4,b:4`, or a file), and how many ranks each gets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.launch.cores import count
from farandole.launch.placement import LaunchError


@dataclass(frozen=True)
class Host:
    """A host, by the name with which the remote shell reaches it, and how many ranks it takes."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """The hosts of `--hosts`: names with slots, 1 where none are given.

    >>> parse_hosts("a:4,b")
    [Host(name='a', slots=4), Host(name='b', slots=1)]
    """
    return _distinct([_host(word, f"--hosts {text}") for word in text.split(",")], f"--hosts {text}")


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file with lines like `a slots=4` or `a:4`; what follows a # is a remark."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise LaunchError(f"--hostfile {path}: {error.strerror}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(" slots=", ":").replace(" ", "")
        if words:
            hosts.append(_host(words, f"{path}, line {number}"))
    if not hosts:
        raise LaunchError(f"--hostfile {path} names no host; a line is like: node0 slots=4")
    return _distinct(hosts, f"--hostfile {path}")


def spread(hosts: Sequence[Host], ranks: int | None) -> list[Host]:
    """The hosts that get ranks, and how many: the first are filled first; without `ranks` all are filled."""
    slots = sum(host.slots for host in hosts)
    if ranks is None:
        return list(hosts)
    if ranks > slots:
        named = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(f"--ranks {ranks}: the hosts have {count(slots, 'slot')} together ({named})")
    filled = []
    for host in hosts:
        if ranks > 0:
            filled.append(Host(host.name, min(host.slots, ranks)))
            ranks -= host.slots
    return filled


def is_here(name: str) -> bool:
    """Whether a host's name is this machine's: a process can listen at its address."""
    if name in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.bind(address)
                return True
    return False


def _host(words: str, where: str) -> Host:
    name, colon, slots = words.strip().partition(":")
    if not name or name.startswith("-") or (colon and not (slots.isdecimal() and int(slots) > 0)):
        raise LaunchError(f"{where}: {words.strip()!r} is not HOST:SLOTS, as in node0:4")
    return Host(name, int(slots) if colon else 1)


def _distinct(hosts: list[Host], where: str) -> list[Host]:
    names = [host.name for host in hosts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise LaunchError(f"{where}: named twice: {', '.join(twice)}; give a host all its slots at once")
    return hosts
