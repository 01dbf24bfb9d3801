"""The network interfaces of this host and their IPv4 addresses."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from farandole.launch.placement import LaunchError

SIOCGIFADDR = 0x8915
"""netdevice(7): the address of an interface (Linux)."""

SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables in which Gloo and NCCL look for the interfaces to use."""


def addresses() -> dict[str, str]:
    """The address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def chosen(names: str | None) -> dict[str, str]:
    """The interfaces that the user has named ("eth0,eth1"), or all but the loopback.

    Raises `LaunchError` for a name that this host does not have.
    """
    there = addresses()
    if names is None:
        return {name: address for name, address in there.items() if not address.startswith("127.")}
    for name in names.split(","):
        if name not in there:
            raise LaunchError(
                f"--network-interface {name}: this host ({socket.gethostname()}) has no such interface with an "
                f"IPv4 address; it has {', '.join(f'{n} ({a})' for n, a in there.items()) or 'none'}"
            )
    return {name: there[name] for name in names.split(",")}


def use(names: str) -> None:
    """Have the ranks that are started from here speak to other hosts over these interfaces."""
    os.environ.update(dict.fromkeys(SETTINGS, names))


def are_chosen() -> bool:
    """Whether the user has set such a variable."""
    return any(setting in os.environ for setting in SETTINGS)


def towards(address: str) -> str | None:
    """The interface by which this host reaches an address, or has it itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        source = probe.getsockname()[0]
    there = addresses()
    ways = [name for name, own in there.items() if own == address] + [
        name for name, own in there.items() if own == source
    ]
    return ways[0] if ways else None
