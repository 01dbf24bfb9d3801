"""The hosts of a job: their names and slots, and the rendezvous of their launchers.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farandole._startup import uncollected
from farandole._troubleshooting import see
from farandole.launch.placement import LaunchError
from farandole.launch.reports import count

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 600.0
"""How long launchers wait for each other by default, in seconds."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables from which Gloo and NCCL read the network interfaces to use."""


@dataclass(frozen=True)
class Host:
    """A host's name, as used by the remote shell, and its maximum number of ranks."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """Parse the value of `--hosts`: host names, each with an optional number of slots (by default 1).

    >>> parse_hosts("a:4,b")
    [Host(name='a', slots=4), Host(name='b', slots=1)]
    """
    return _distinct([_host(word, f"--hosts {text}") for word in text.split(",")], f"--hosts {text}")


def read_hostfile(path: Path) -> list[Host]:
    """Read a file with lines such as `a slots=4` or `a:4`; comments start with #.

    Raises:
        LaunchError: if the file cannot be read or contains no host.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise LaunchError(f"cannot read --hostfile {path}: {error.strerror}; correct the path") from error
    except UnicodeDecodeError as error:
        raise LaunchError(
            f"cannot read --hostfile {path}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(" slots=", ":").replace(" ", "")
        if words:
            hosts.append(_host(words, f"{path}, line {number}"))
    if not hosts:
        raise LaunchError(f"--hostfile {path} contains no host; expected lines such as: node0 slots=4")
    return _distinct(hosts, f"--hostfile {path}")


def assign_ranks(hosts: Sequence[Host], ranks: int | None) -> list[Host]:
    """Assign ranks to hosts, filling the hosts in order.

    Args:
        hosts: The available hosts.
        ranks: The number of ranks, or None to assign one rank to each slot.

    Returns:
        The hosts that have ranks.  The `slots` attribute of a returned host is the number of its ranks.

    Raises:
        LaunchError: if there are fewer slots than ranks.
    """
    slots = sum(host.slots for host in hosts)
    if ranks is None:
        return list(hosts)
    if ranks > slots:
        named = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"--ranks {ranks}: the hosts have only {count(slots, 'slot')} in total ({named}); add hosts or slots, or "
            f"use fewer ranks"
        )
    filled = []
    for host in hosts:
        if ranks > 0:
            filled.append(Host(host.name, min(host.slots, ranks)))
            ranks -= host.slots
    return filled


def is_this_host(name: str) -> bool:
    """Return whether `name` refers to this host.

    A name refers to this host if a socket can be bound to its address.
    """
    if name in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.bind(address)
                return True
    return False


def _host(words: str, source: str) -> Host:
    name, colon, slots = words.strip().partition(":")
    if not name or name.startswith("-") or (colon and not (slots.isdecimal() and int(slots) > 0)):
        raise LaunchError(
            f"{source}: {words.strip()!r} is not HOST:SLOTS, as in node0:4{see('is-not-hostslots')}"
        )
    return Host(name, int(slots) if colon else 1)


def _distinct(hosts: list[Host], source: str) -> list[Host]:
    names = [host.name for host in hosts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise LaunchError(
            f"{source}: duplicate hosts {', '.join(twice)}; list each host once, with all its slots"
        )
    return hosts


@dataclass(frozen=True)
class RendezvousConfig:
    """Describes how the launchers of a job, one per host, find each other.

    The job has `nodes` launchers, and `node_rank` is the index of this launcher.  The launchers share a store, which
    listens on `port` at one of `addresses`.  Without addresses, the job runs on one host, and the store listens on a
    free port of the loopback interface.
    """

    nodes: int = 1
    node_rank: int = 0
    addresses: Sequence[str] = ()
    """The possible addresses of the store; the first address that answers is used."""
    port: int = 0
    serves_store: bool = True
    """Whether this launcher serves the store, which then ends with the launcher."""
    on_store_host: bool = True
    """Whether this launcher runs on the host of the store; True if this is unknown."""
    interfaces: str | None = None
    """The network interfaces that the user selected for the ranks ("eth0,eth1")."""
    choose_interface: bool = False
    """Whether the ranks use the network interface through which the store was reached."""
    timeout_s: float = START_TIMEOUT_S
    """How long to wait for the other launchers, in seconds."""


def parse_rendezvous(
    nodes: int, node_rank: int, address: str | None, timeout_s: float, interfaces: str | None = None
) -> RendezvousConfig:
    """Return the rendezvous configuration of a launcher that the user has started on this host.

    Args:
        nodes: The value of `--nodes`, the number of hosts.
        node_rank: The value of `--node-rank`, the index of this host.
        address: The value of `--rendezvous`: the first host and a port, as "HOST:PORT"; None for a job on one host.
        timeout_s: How long to wait for the other launchers, in seconds.
        interfaces: The value of `--network-interface`, or None.

    Raises:
        LaunchError: if `address` is invalid, or is None with several hosts, or if `node_rank` is out of range.
    """
    if nodes < 1 or not 0 <= node_rank < nodes:
        raise LaunchError(
            f"--node-rank {node_rank} is out of range for --nodes {nodes}: expected a number from 0 to "
            f"{max(nodes, 1) - 1}"
        )
    config = RendezvousConfig(nodes, node_rank, interfaces=interfaces, timeout_s=timeout_s)
    if address is None:
        if nodes > 1:
            raise LaunchError(
                f"--nodes {nodes} requires --rendezvous HOST:PORT, a free port on the first host; "
                "alternatively, --hosts a:4,b:4 starts the ranks on all hosts from this host"
            )
        return config
    host, _, port = address.rpartition(":")
    if host and port == "0" and nodes == 1:  # as in torchrun, any free port
        return config
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"--rendezvous: expected HOST:PORT, such as node0:29500, got {address!r}")
    return replace(config, addresses=(host.strip("[]"),), port=int(port), serves_store=node_rank == 0)


def find_interfaces(names: str | None) -> dict[str, str]:
    """Return a dict that maps the names of network interfaces to their IPv4 addresses.

    Args:
        names: The names of the interfaces ("eth0,eth1"), or None for all interfaces except the loopback interface.

    Raises:
        LaunchError: if this host lacks one of the named interfaces.
    """
    with uncollected():  # loads torch
        from farandole.comm.interfaces import interface_addresses, is_loopback

    found = interface_addresses()
    if names is None:
        return {name: address for name, address in found.items() if not is_loopback(address)}
    for name in names.split(","):
        if name not in found:
            raise LaunchError(
                f"--network-interface {name}: this host ({socket.gethostname()}) has no such interface with an "
                f"IPv4 address; choose from: {', '.join(f'{n} ({a})' for n, a in found.items()) or 'none'}"
            )
    return {name: found[name] for name in names.split(",")}


def use_interfaces(names: Iterable[str]) -> None:
    """Set environment variables so that ranks started later use these interfaces for inter-node traffic."""
    os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, ",".join(names)))


def interfaces_are_set() -> bool:
    """Return whether the environment specifies network interfaces."""
    return any(variable in os.environ for variable in INTERFACE_VARIABLES)
