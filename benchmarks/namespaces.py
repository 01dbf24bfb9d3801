"""Simulate two hosts on one machine with network namespaces, connected by a link with a given rate.

    with two_hosts(rate="1gbit") as hosts:
        process = hosts[1].start([sys.executable, "program.py"], env)     # in the network of the second host

The simulation requires root, ip and tc (iproute2).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_numbers = itertools.count()
_NEW_NETWORK = 0x40000000  # linux/sched.h


def why_not() -> str | None:
    """Return why hosts cannot be simulated on this machine, or None."""
    if os.geteuid():
        return "only root can create network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (package iproute2)"
    with contextlib.suppress(subprocess.CalledProcessError), two_hosts():
        return None
    return "this kernel or container does not support network namespaces, or links with a limited rate between them"


@dataclass(frozen=True)
class Host:
    """A network namespace, with its address and interface on the link."""

    name: str
    address: str
    interface: str

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options
    ) -> subprocess.Popen:
        """Start a process in this host's network namespace."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], env=env, **options)

    def enter(self) -> None:
        """Move the calling process into this host's network namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}") as namespace:
            failed = libc.setns(namespace.fileno(), _NEW_NETWORK)
        if failed:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {self.name}")

    def link(self, state: str) -> None:
        """Set this host's interface `up` or `down`."""
        _run("ip", "-n", self.name, "link", "set", self.interface, state)


@contextlib.contextmanager
def two_hosts(rate: str | None = None) -> Iterator[list[Host]]:
    """Create two hosts, connected by a link with `rate` in each direction.

    `rate` is in the notation of `tc`; by default the link is unlimited.
    """
    mark = f"frd{os.getpid() % 100_000}{next(_numbers)}"
    hosts = [
        Host(f"{mark}{side}", f"10.213.77.{number}", f"{mark}{side}") for number, side in ((1, "a"), (2, "b"))
    ]
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
        _run("ip", "link", "add", hosts[0].interface, "netns", hosts[0].name, "type", "veth",
             "peer", "name", hosts[1].interface, "netns", hosts[1].name)  # fmt: skip
        for host in hosts:
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for device in ("lo", host.interface):
                _run("ip", "-n", host.name, "link", "set", device, "up")
            if rate:
                limit = ("tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
                _run("tc", "-n", host.name, "qdisc", "replace", "dev", host.interface, "root", *limit)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def launch_on_hosts(module: str, arguments: Sequence[str], per_host: int, rate: str | None) -> int:
    """Run a module on `per_host` ranks on each of two hosts, and return the highest exit status.

    Raises:
        SystemExit: Hosts cannot be simulated on this machine.
    """
    if reason := why_not():
        raise SystemExit(f"cannot simulate hosts on this machine: {reason}")
    with two_hosts(rate) as hosts:
        processes = []
        for rank in range(2 * per_host):
            host = hosts[rank // per_host]
            place = {
                "RANK": rank,
                "WORLD_SIZE": 2 * per_host,
                "LOCAL_RANK": rank % per_host,
                "LOCAL_WORLD_SIZE": per_host,
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": 29600,  # free, because the network namespaces are new
                "GLOO_SOCKET_IFNAME": host.interface,
            }
            env = os.environ | {name: str(value) for name, value in place.items()}
            processes.append(host.start([sys.executable, "-m", module, *arguments], env))
        return max(abs(process.wait()) for process in processes)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
