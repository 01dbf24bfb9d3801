"""How the launchers of a job's hosts find each other: numbers, and where their store is."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.launch.placement import LaunchError

START_TIMEOUT_S = 600.0
"""How long launchers wait for each other by default, in seconds."""


@dataclass(frozen=True)
class Gathering:
    """Launcher `node` of `nodes`, one per host, and the store through which they speak.

    On one host there is no address: the store is at a free port that only this host reaches.
    """

    nodes: int = 1
    node: int = 0
    addresses: tuple[str, ...] = ()
    """Where the store may be reached; the first address that answers is taken."""
    port: int = 0
    keeps_store: bool = True
    """Whether this launcher has the store, which then ends with it."""
    local: bool = True
    """Whether this launcher runs on the host of the store, or cannot tell."""
    choose_interface: bool = False
    """Whether the ranks speak over the interface by which the store was reached."""
    timeout_s: float = START_TIMEOUT_S
    """How long to wait for the others."""


def gather_by_hand(nodes: int, node: int, rendezvous: str | None, timeout_s: float) -> Gathering:
    """The gathering of launchers that a person starts on each host, meeting at HOST:PORT on the first."""
    if nodes < 1 or not 0 <= node < nodes:
        raise LaunchError(
            f"--node-rank {node} of --nodes {nodes}: the hosts of a job of {max(nodes, 1)} are numbered "
            f"from 0 to {max(nodes, 1) - 1}"
        )
    if rendezvous is None:
        if nodes > 1:
            raise LaunchError(
                f"--nodes {nodes} needs --rendezvous HOST:PORT, a free port on the first host; "
                f"or name the hosts (--hosts a:4,b:4), and they are started from here"
            )
        return Gathering(timeout_s=timeout_s)
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"--rendezvous {rendezvous!r} is not HOST:PORT, as in node0:29500")
    return Gathering(nodes, node, (host.strip("[]"),), int(port), keeps_store=node == 0, timeout_s=timeout_s)
