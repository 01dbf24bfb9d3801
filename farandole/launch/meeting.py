"""Where the ranks of a job meet: the key-value store through which a process group is built.

Ranks of one host need an address that all of them can work out, that two jobs never share, and that leaves
nothing behind however the job ends.  A name in Linux's *abstract* socket space, made from the job's
identity, has all three: rank 0 listens there and tells the others the port of its store.  The kernel says
who is at the other end of such a socket, so another user of the machine can neither pose as rank 0 nor
learn the port.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from farandole.launch.placement import Address, LaunchError, NoMeeting, Placement, SameHost, TorchVariables

LOOPBACK = "127.0.0.1"


def open_store(placement: Placement, timeout_s: float) -> dist.Store:
    """The store that all ranks of the job share; raises `LaunchError` if they cannot meet in time.

    A launcher's store outlives the groups that are made through it, so that each time the ranks meet they
    get a corner of their own, without the keys of the last time.
    """
    if placement.size == 1:
        return dist.HashStore()
    store = _open(placement, timeout_s)
    times = store.add(f"farandole/met/{placement.rank}", 1)
    return dist.PrefixStore(f"farandole/{times}", store)


def wait_for_readers(store: dist.Store, placement: Placement) -> None:
    """Called by all ranks when they have read what they need to make their group.

    Rank 0, whose end may be that of the store, waits for the others.
    """
    if placement.rank > 0:
        store.set(f"farandole/has read/{placement.rank}", "")
    else:
        store.wait([f"farandole/has read/{rank}" for rank in range(1, placement.size)])


def _open(placement: Placement, timeout_s: float) -> dist.Store:
    match placement.meeting:
        case TorchVariables():
            timeout = timedelta(seconds=timeout_s)
            meet = dist.rendezvous("env://", placement.rank, placement.size, timeout=timeout)
            store: dist.Store = next(meet)[0]
            return store
        case Address(host, port):
            return _at_address(host, port, placement, timeout_s)
        case SameHost(job):
            return _on_host(job, placement, timeout_s)
        case NoMeeting(advice):
            raise LaunchError(
                f"{placement.launcher} started {placement.size} ranks on several hosts, and they do not "
                f"know where to meet; {advice}"
            )


def host_store() -> dist.TCPStore:
    """A new store at a free port, reachable from this host only."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def meeting_name(job: str) -> str:
    """The name in the abstract socket space under which the ranks of a job on this host meet."""
    return "farandole-" + hashlib.sha256(f"{os.getuid()} {job}".encode()).hexdigest()[:32]


def _at_address(host: str, port: int, placement: Placement, timeout_s: float) -> dist.Store:
    timeout = timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(host, port, placement.size, is_master=placement.rank == 0, timeout=timeout)
    except (RuntimeError, ValueError) as error:  # torch raises both: DistNetworkError is a RuntimeError
        raise LaunchError(
            f"rank {placement.rank} of {placement.size} ({placement.launcher}) could not meet the others at "
            f"{host}:{port}: {error}; MASTER_ADDR and MASTER_PORT choose another place"
        ) from error


def _on_host(job: str, placement: Placement, timeout_s: float) -> dist.Store:
    if sys.platform != "linux":
        raise LaunchError(
            f"{placement.launcher} does not say where its ranks meet, and this system has no abstract sockets "
            f"to meet at; set MASTER_ADDR={LOOPBACK} and MASTER_PORT to a free port"
        )
    name = "\0" + meeting_name(job)
    if placement.rank == 0:
        store = host_store()
        _tell_port(name, store.port, placement.size - 1, timeout_s)
    else:
        port, timeout = _learn_port(name, placement, timeout_s), timedelta(seconds=timeout_s)
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _tell_port(name: str, port: int, others: int, timeout_s: float) -> None:
    """Listen at `name` and, beside what this process does meanwhile, give `port` to each other rank."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"another process already meets the ranks of this job: {error}; if two programs of one job call "
            f"farandole.init() at once, give each its own MASTER_ADDR and MASTER_PORT"
        ) from error
    listener.listen(others)

    def serve() -> None:
        deadline = time.monotonic() + timeout_s
        told = 0
        with listener:
            while told < others and (left := deadline - time.monotonic()) > 0:
                listener.settimeout(left)
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    return  # the missing rank says so itself, and so does this one's store
                with peer, contextlib.suppress(ConnectionError):  # a rank that has just died
                    if _user_of(peer) == os.getuid():
                        peer.sendall(b"%d\n" % port)
                        told += 1

    threading.Thread(target=serve, name="farandole-meeting", daemon=True).start()


def _learn_port(name: str, placement: Placement, timeout_s: float) -> int:
    """Ask rank 0 for its port, until it is there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                peer.connect(name)
                if _user_of(peer) == os.getuid() and (answer := peer.recv(16)):
                    return int(answer)
            except OSError:  # rank 0 is not there yet
                time.sleep(0.02)
    raise LaunchError(
        f"rank {placement.rank} of {placement.size} waited {timeout_s:g} s for rank 0 of its job on this host "
        f"({placement.launcher}); rank 0 ended, or never called farandole.init()"
    )


def _user_of(peer: socket.socket) -> int:
    """The user whose process is at the other end, as the kernel knows it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user
