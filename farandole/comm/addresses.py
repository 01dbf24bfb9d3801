"""Which address of this host the ranks of other hosts can reach, and addresses as the kernel takes them."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import Any

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def own_address(store: Any, interface: str | None) -> str:
    """The address of `interface`; or the one by which this host reaches the store of the job; or any other.

    That may be its loopback, which serves hosts that are namespaces of one machine's network at best.  OSError
    where there is no such interface, or none at all.
    """
    if interface:
        return _of_interface(interface)
    candidates = [_towards(_host_of(store)), *(_address_or_none(name) for _, name in socket.if_nameindex())]
    found = [address for address in candidates if address]
    outside = [address for address in found if not is_loopback(address)]
    if not found:
        raise OSError("this host has no network interface that is up, not even its loopback")
    return (outside or found)[0]


def is_loopback(address: str) -> bool:
    """Whether only this host can reach it."""
    return ipaddress.ip_address(address).is_loopback


def socket_address(address: str, port: int) -> bytes:
    """`struct sockaddr_in` or `sockaddr_in6`."""
    packed = ipaddress.ip_address(address).packed
    if len(packed) == 4:
        return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + packed + bytes(8)
    return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + packed + bytes(4)


def _host_of(store: Any) -> str | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def _towards(host: str | None) -> str | None:
    """The local address of packets to `host` (none is sent)."""
    if not host:
        return None
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return None


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            there = ", ".join(other for _, other in socket.if_nameindex())
            raise OSError(
                f"network interface {name!r} has no IPv4 address here ({error.strerror}); there are: {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _address_or_none(interface: str) -> str | None:
    try:
        return _of_interface(interface)
    except OSError:
        return None
