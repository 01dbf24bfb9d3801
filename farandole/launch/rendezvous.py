"""How the launchers of a job's hosts meet, and how they learn of each other's failures.

There is one launcher per host.  They share a store, kept by the launcher of the first host, which the ranks
use as well: it outlives every one of them.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from farandole.launch.meeting import LOOPBACK, host_store
from farandole.launch.placement import LaunchError

FAILED, DONE = "farandole/failed", "farandole/done"
TIMEOUT_S = 600.0
LOOK_S = 1.0
"""How often a launcher looks for failures elsewhere, in seconds."""


class FixedRendezvous(RendezvousHandler):
    """The meeting of a fixed number of launchers, one per host, at the store of the first.

    On a single host the store is at a free port that only this host reaches.
    """

    def __init__(self, run_id: str, nodes: int, node_rank: int, endpoint: tuple[str, int] | None) -> None:
        self._run_id = run_id
        self._nodes = nodes
        self._node_rank = node_rank
        self._endpoint = endpoint
        self._store: dist.TCPStore | None = None
        self._looked_at = 0.0
        self.failed_elsewhere: str | None = None
        """What the launcher of another host said about its failure."""

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet at the launcher's store too."""
        return True

    def get_backend(self) -> str:
        """The name under which torch logs this rendezvous."""
        return "fixed"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all launchers are here."""
        if self._endpoint is None:
            self._store = host_store()
            host, port = LOOPBACK, self._store.port
        else:
            host, port = self._endpoint
            self._store = self._meet(host, port)
        return RendezvousInfo(self._store, self._node_rank, self._nodes, RendezvousStoreInfo(host, port))

    def _meet(self, host: str, port: int) -> dist.TCPStore:
        deadline = time.monotonic() + TIMEOUT_S
        first = self._node_rank == 0
        if not first:
            _wait_for_port(host, port, deadline)
        try:
            store = dist.TCPStore(
                host, port, is_master=first, wait_for_workers=False, timeout=timedelta(seconds=30)
            )
        except (RuntimeError, ValueError) as error:
            raise LaunchError(f"cannot meet at {host}:{port}: {error}") from error
        if store.add(f"farandole/node/{self._node_rank}", 1) > 1:
            raise LaunchError(
                f"two launchers at {host}:{port} have --node-rank {self._node_rank}; "
                f"each host has its own, from 0 to {self._nodes - 1}"
            )
        missing = list(range(self._nodes))
        while missing:
            missing = [node for node in missing if not store.check([f"farandole/node/{node}"])]
            if missing and time.monotonic() > deadline:
                raise LaunchError(
                    f"{self._nodes} hosts should meet at {host}:{port}; "
                    f"not here after {TIMEOUT_S:g} s: node {', '.join(map(str, missing))}"
                )
            time.sleep(0.05)
        return store

    def is_closed(self) -> bool:
        """Never: the hosts of a job are fixed."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """None: nobody joins later."""
        return 0

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store goes with the object."""
        self._store = None
        return True

    def look_elsewhere(self) -> bool:
        """Whether the ranks of another host failed; looks once a second."""
        now = time.monotonic()
        if self._nodes > 1 and self._store is not None and now >= self._looked_at + LOOK_S:
            self._looked_at = now
            try:
                if self.failed_elsewhere is None and self._store.check([FAILED]):
                    self.failed_elsewhere = self._store.get(FAILED).decode()
            except RuntimeError:
                self.failed_elsewhere = "the launcher of node 0 has ended"
        return self.failed_elsewhere is not None

    def tell_failure(self, message: str) -> None:
        """Let the launchers of the other hosts know that the ranks of this one failed."""
        if self._nodes == 1 or self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone, and so the others know
            self._store.set(FAILED, f"node {self._node_rank}: {message}")
        if self._node_rank == 0:
            time.sleep(1.5 * LOOK_S)  # the store lives here

    def wait_for_others(self, give_up: Callable[[], bool]) -> None:
        """Wait until the ranks of every host have ended well, or some have not."""
        if self._nodes == 1 or self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # node 0 saw that all are done, and left
            self._store.add(DONE, 1)
            while self._store.add(DONE, 0) < self._nodes and not self.look_elsewhere() and not give_up():
                time.sleep(0.1)
            if self._node_rank == 0:
                time.sleep(0.5)  # the others look ten times a second


def _wait_for_port(host: str, port: int, deadline: float) -> None:
    """Wait in Python, where Ctrl-C works, until the first host's launcher listens."""
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"no launcher with --node-rank 0 answers at {host}:{port}: {error}"
                ) from error
            time.sleep(0.2)
