"""The rendezvous of a job's launchers, one per host, and the exchange of failure messages between hosts.

The launchers share a store, served by the launcher of the first host or by the command that started all launchers.  The
ranks use the same store, which outlives every rank.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from farandole.comm.interfaces import interface_toward
from farandole.launch.bootstrap import loopback_store
from farandole.launch.hosts import LOOPBACK, RendezvousConfig, interfaces_are_set, use_interfaces
from farandole.launch.placement import LaunchError

FAILED, DONE, REACHED_AT = "farandole/failed", "farandole/done", "farandole/reached at"
CHECK_S = 1.0
"""How often a launcher checks for failures on other hosts, in seconds."""


class LauncherRendezvous(StaticTCPRendezvous):
    """Torch's rendezvous for a fixed number of launchers; also reports missing hosts and publishes failures."""

    def __init__(self, run_id: str, config: RendezvousConfig) -> None:
        super().__init__("", config.port, config.node_rank, config.nodes, run_id, math.ceil(config.timeout_s))
        self._config = config
        self._store: dist.TCPStore | None = None
        self._checked_at = 0.0
        self.remote_failure: str | None = None
        """The failure that another host's launcher published."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all launchers; return this launcher's index, the number of launchers and the shared store."""
        config = self._config
        if config.nodes == 1 and not config.addresses:
            self._store = loopback_store()
            host, port = LOOPBACK, self._store.port
        else:
            deadline = time.monotonic() + config.timeout_s
            host, port = config.addresses[0], config.port
            if not config.serves_store:
                host = _find_store(config.addresses, port, deadline)
            self._store = self._join(host, port, deadline)
        return RendezvousInfo(self._store, config.node_rank, config.nodes, RendezvousStoreInfo(host, port))

    def _join(self, host: str, port: int, deadline: float) -> dist.TCPStore:
        config = self._config
        try:
            timeout, serves = timedelta(seconds=30), config.serves_store
            store = dist.TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"cannot open the job's store at {host}:{port}: {error}; check the network, or choose another port"
            ) from error
        if not config.on_store_host:
            store.set(REACHED_AT, host)
        if store.add(f"farandole/node/{config.node_rank}", 1) > 1:
            raise LaunchError(
                f"two launchers at {host}:{port} have --node-rank {config.node_rank}; give each "
                f"host its own number, from 0 to {config.nodes - 1}"
            )
        self._wait_for_launchers(store, f"{host}:{port}", deadline)
        if config.choose_interface and not interfaces_are_set():
            reached_at = store.get(REACHED_AT).decode() if store.check([REACHED_AT]) else host
            if interface := interface_toward(reached_at):
                use_interfaces([interface])
        return store

    def _wait_for_launchers(self, store: dist.TCPStore, address: str, deadline: float) -> None:
        nodes, timeout_s = self._config.nodes, self._config.timeout_s
        missing = list(range(nodes))
        while missing := [node for node in missing if not store.check([f"farandole/node/{node}"])]:
            if store.check([FAILED]):
                raise LaunchError(store.get(FAILED).decode())
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"expected the launchers of {nodes} nodes at {address}, but some are missing after {timeout_s:g} "
                    f"s: {', '.join(f'node {node}' for node in missing)}; start a launcher on each missing node"
                )
            time.sleep(0.05)

    def check_remote_failure(self) -> bool:
        """Return whether another host has published a failure or the store is unreachable.

        The store is read at most once per second.
        """
        now = time.monotonic()
        if self._config.nodes > 1 and self._store is not None and now >= self._checked_at + CHECK_S:
            self._checked_at = now
            try:
                if self.remote_failure is None and self._store.check([FAILED]):
                    self.remote_failure = self._store.get(FAILED).decode()
            except RuntimeError:
                self.remote_failure = "the launcher that serves the job's store has ended"
        return self.remote_failure is not None

    def publish_failure(self, message: str) -> None:
        """Publish a message about failed ranks of this host to the launchers of the other hosts."""
        if self._config.nodes == 1 or self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store has ended; the other launchers detect this
            self._store.set(FAILED, f"node {self._config.node_rank}: {message}")
        if self._config.serves_store:
            time.sleep(1.5 * CHECK_S)

    def wait_for_others(self, give_up: Callable[[], bool]) -> None:
        """Wait until the ranks of all hosts have succeeded, a host has failed, or `give_up` returns True."""
        nodes = self._config.nodes
        if nodes == 1 or self._store is None:
            return
        with contextlib.suppress(RuntimeError):  # node 0 has ended, because all hosts are done
            self._store.add(DONE, 1)
            while self._store.add(DONE, 0) < nodes and not self.check_remote_failure() and not give_up():
                time.sleep(0.1)
            if self._config.serves_store:
                time.sleep(0.5)  # the other launchers check ten times a second


def _find_store(hosts: Sequence[str], port: int, deadline: float) -> str:
    """Return the first host at which the store answers."""
    while True:  # poll in Python, so that Ctrl-C works
        for host in hosts:
            try:
                socket.create_connection((host, port), timeout=2).close()
            except OSError as error:
                refusal = f"{host}:{port}: {error}"
            else:
                return host
        if time.monotonic() > deadline:
            raise LaunchError(
                f"no launcher answers at {refusal} (tried {', '.join(hosts)}); check the network and firewall"
            )
        time.sleep(0.2)
