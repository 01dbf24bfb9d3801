"""Network interfaces, and the address at which other hosts reach this host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import Any

_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface (Linux)


def interface_addresses() -> dict[str, str]:
    """Return a dict that maps the names of this host's interfaces to their IPv4 addresses."""
    found = {}
    for _, name in socket.if_nameindex():
        try:
            found[name] = _address_of(name)
        except OSError:  # the interface has no IPv4 address
            continue
    return found


def interface_toward(host: str) -> str | None:
    """Return the name of the interface through which packets to `host` are sent, or None if it is unknown."""
    source = _source_address(host, socket.AF_INET)
    return next((name for name, address in interface_addresses().items() if address == source), None)


def own_address(store: Any, interface: str | None) -> str:
    """Return the address at which other hosts reach this host.

    If `interface` is None, return the address from which this host sends packets to the store's host.  If this address
    is unknown or is a loopback address, return the address of another interface.  Return a loopback address only if
    there is no other address, because other machines cannot reach it.

    Raises:
        OSError: if `interface` has no IPv4 address, or no interface of this host has an address.
    """
    if interface:
        try:
            return _address_of(interface)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise OSError(
                f"expected a network interface with an IPv4 address, got {interface!r} ({error.strerror}); "
                f"choose one of {names}"
            ) from error
    host = _host_of(store)
    source = _source_address(host) if host else None
    found = [*([source] if source else []), *interface_addresses().values()]
    if not found:
        raise OSError(
            "found no network interface with an address; enable an interface, at least the loopback interface"
        )
    return next((address for address in found if not is_loopback(address)), found[0])


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address, which other hosts cannot reach."""
    return ipaddress.ip_address(address).is_loopback


def socket_address(address: str, port: int) -> bytes:
    """Return `address` and `port` as the bytes of a `struct sockaddr_in` or `struct sockaddr_in6`."""
    packed = ipaddress.ip_address(address).packed
    if len(packed) == 4:
        return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + packed + bytes(8)
    return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + packed + bytes(4)


def _host_of(store: Any) -> str | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def _source_address(host: str, family: int = socket.AF_UNSPEC) -> str | None:
    """Return the source address for packets to `host`, without sending a packet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])
