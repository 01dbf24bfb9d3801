"""Hosts on one machine: network namespaces joined by a link of a given speed.  Needs root, ip and tc (iproute2).

with two_hosts(rate="1gbit") as hosts:
    process = hosts[1].start([sys.executable, "program.py"], env)     # its network is that of the second host
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_numbers = itertools.count()
_NEW_NETWORK = 0x40000000  # linux/sched.h


def why_not() -> str | None:
    """Why hosts cannot be made here, or None."""
    if os.geteuid():
        return "only root can make network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (package iproute2)"
    with contextlib.suppress(subprocess.CalledProcessError), two_hosts():
        return None
    return "this kernel or container makes no network namespaces, or no limited links between them"


@dataclass(frozen=True)
class Host:
    """A namespace and its address on the link."""

    name: str
    address: str
    interface: str

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options
    ) -> subprocess.Popen:
        """Start a process whose network is that of this host."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], env=env, **options)

    def enter(self) -> None:
        """Give the calling process the network of this host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}") as namespace:
            failed = libc.setns(namespace.fileno(), _NEW_NETWORK)
        if failed:
            raise OSError(ctypes.get_errno(), f"no way into network namespace {self.name}")

    def link(self, state: str) -> None:
        """Take its end of the link `up` or `down`."""
        _run("ip", "-n", self.name, "link", "set", self.interface, state)


@contextlib.contextmanager
def two_hosts(rate: str | None = None) -> Iterator[list[Host]]:
    """Two hosts, joined by a link of that rate in each direction (as `tc` writes it), or an unlimited one."""
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


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
