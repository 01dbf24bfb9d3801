"""How the launchers of a job's hosts meet, and how they learn of each other's failures.

There is one launcher per host.  They share a store, kept by the launcher of the first host or by the command
that started them all, which the ranks use as well: it outlives every one of them.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from farandole.launch.gathering import Gathering
from farandole.launch.interfaces import are_chosen, towards, use
from farandole.launch.meeting import LOOPBACK, host_store
from farandole.launch.placement import LaunchError

FAILED, DONE, REACHED_AT = "farandole/failed", "farandole/done", "farandole/reached at"
LOOK_S = 1.0
"""How often a launcher looks for failures elsewhere, in seconds."""


class FixedRendezvous(RendezvousHandler):
    """The meeting of a fixed number of launchers, one per host."""

    def __init__(self, run_id: str, gathering: Gathering) -> None:
        self._run_id = run_id
        self._gathering = gathering
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
        here = self._gathering
        if here.nodes == 1 and not here.addresses:
            self._store = host_store()
            host, port = LOOPBACK, self._store.port
        else:
            deadline = time.monotonic() + here.timeout_s
            port = here.port
            host = (
                here.addresses[0]
                if here.keeps_store
                else _first_that_answers(here.addresses, here.port, deadline)
            )
            self._store = self._meet(host, port, deadline)
        return RendezvousInfo(self._store, here.node, here.nodes, RendezvousStoreInfo(host, port))

    def _meet(self, host: str, port: int, deadline: float) -> dist.TCPStore:
        here = self._gathering
        try:
            store = dist.TCPStore(
                host, port, is_master=here.keeps_store, wait_for_workers=False, timeout=timedelta(seconds=30)
            )
        except (RuntimeError, ValueError) as error:
            raise LaunchError(f"cannot meet at {host}:{port}: {error}") from error
        if not here.local:
            store.set(REACHED_AT, host)
        if store.add(f"farandole/node/{here.node}", 1) > 1:
            raise LaunchError(
                f"two launchers at {host}:{port} have --node-rank {here.node}; "
                f"each host has its own, from 0 to {here.nodes - 1}"
            )
        self._wait_until_all_are_here(store, f"{host}:{port}", deadline)
        if here.choose_interface and not are_chosen():
            reached_at = store.get(REACHED_AT).decode() if store.check([REACHED_AT]) else host
            if interface := towards(reached_at):
                use(interface)
        return store

    def _wait_until_all_are_here(self, store: dist.TCPStore, place: str, deadline: float) -> None:
        missing = list(range(self._gathering.nodes))
        while True:
            missing = [node for node in missing if not store.check([f"farandole/node/{node}"])]
            if not missing:
                return
            if store.check([FAILED]):
                raise LaunchError(store.get(FAILED).decode())
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{self._gathering.nodes} hosts should meet at {place}; not here after "
                    f"{self._gathering.timeout_s:g} s: node {', '.join(map(str, missing))}"
                )
            time.sleep(0.05)

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
        if self._gathering.nodes > 1 and self._store is not None and now >= self._looked_at + LOOK_S:
            self._looked_at = now
            try:
                if self.failed_elsewhere is None and self._store.check([FAILED]):
                    self.failed_elsewhere = self._store.get(FAILED).decode()
            except RuntimeError:
                self.failed_elsewhere = "the launcher that keeps the job's store has ended"
        return self.failed_elsewhere is not None

    def tell_failure(self, message: str) -> None:
        """Let the launchers of the other hosts know that the ranks of this one failed."""
        if self._gathering.nodes == 1 or self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone, and so the others know
            self._store.set(FAILED, f"node {self._gathering.node}: {message}")
        if self._gathering.keeps_store:
            time.sleep(1.5 * LOOK_S)

    def wait_for_others(self, give_up: Callable[[], bool]) -> None:
        """Wait until the ranks of every host have ended well, or some have not."""
        nodes = self._gathering.nodes
        if nodes == 1 or self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # node 0 saw that all are done, and left
            self._store.add(DONE, 1)
            while self._store.add(DONE, 0) < nodes and not self.look_elsewhere() and not give_up():
                time.sleep(0.1)
            if self._gathering.keeps_store:
                time.sleep(0.5)  # the others look ten times a second


def _first_that_answers(hosts: Sequence[str], port: int, deadline: float) -> str:
    """The first address at which the store answers; waits in Python, where Ctrl-C works."""
    while True:
        for host in hosts:
            try:
                socket.create_connection((host, port), timeout=2).close()
            except OSError as error:
                refusal = f"{host}:{port}: {error}"
            else:
                return host
        if time.monotonic() > deadline:
            raise LaunchError(f"no launcher answers at {refusal} (tried {', '.join(hosts)})")
        time.sleep(0.2)
