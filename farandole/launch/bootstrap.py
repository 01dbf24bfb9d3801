"""Open the key-value store with which the ranks of a job create their process group.

If the launcher provides no address and all ranks run on one host, the ranks need an address that every rank can derive,
that no other job uses, and that disappears when the job ends.  A name in Linux's *abstract* socket namespace, derived
from the job's identity, has these properties.  Rank 0 listens on this name and sends the port of its store to the other
ranks.  The kernel reports the user of each connection, so another user of the machine can neither impersonate rank 0
nor learn the port.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from farandole._troubleshooting import see
from farandole.launch.hosts import LOOPBACK
from farandole.launch.placement import Address, LaunchError, NoRendezvous, Placement, SameHost, TorchVariables


def open_store(placement: Placement, timeout_s: float) -> dist.Store:
    """Return the store that all ranks of the job share.

    A launcher's store outlives the process groups that use it.  Each call uses a new key prefix, so keys from earlier
    calls are not visible.

    Raises:
        LaunchError: if the ranks cannot rendezvous within `timeout_s` seconds.
    """
    if placement.size == 1:
        return dist.HashStore()
    store = _open(placement, timeout_s)
    joins = store.add(f"farandole/joins/{placement.rank}", 1)
    return dist.PrefixStore(f"farandole/{joins}", store)


def wait_for_readers(store: dist.Store, placement: Placement) -> None:
    """On rank 0, wait until the other ranks have read the store.

    The store may disappear when rank 0 exits.  All ranks must call this function.
    """
    if placement.rank > 0:
        store.set(f"farandole/has read/{placement.rank}", "")
    else:
        store.wait([f"farandole/has read/{rank}" for rank in range(1, placement.size)])


def loopback_store() -> dist.TCPStore:
    """Return a new store that listens on a free port of the loopback interface."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def rendezvous_name(job: str) -> str:
    """Return the abstract socket name through which the ranks of a job on this host find each other."""
    return "farandole-" + hashlib.sha256(f"{os.getuid()} {job}".encode()).hexdigest()[:32]


def _open(placement: Placement, timeout_s: float) -> dist.Store:
    timeout = timedelta(seconds=timeout_s)
    match placement.rendezvous:
        case TorchVariables():
            store: dist.Store = next(
                dist.rendezvous("env://", placement.rank, placement.size, timeout=timeout)
            )[0]
            return store
        case Address(host, port):
            return _open_at_address(host, port, placement, timeout)
        case SameHost(job):
            return _open_on_host(job, placement, timeout)
        case NoRendezvous(advice):
            raise LaunchError(
                f"{placement.launcher} started {placement.size} ranks on several hosts, but no environment "
                f"variable contains the rendezvous address; {advice}"
            )


def _open_at_address(host: str, port: int, placement: Placement, timeout: timedelta) -> dist.Store:
    try:
        return dist.TCPStore(host, port, placement.size, is_master=placement.rank == 0, timeout=timeout)
    except (RuntimeError, ValueError) as error:  # torch raises both: DistNetworkError is a RuntimeError
        raise LaunchError(
            f"rank {placement.rank} of {placement.size} ({placement.launcher}) could not reach the store at "
            f"{host}:{port}: {error}; check that rank 0 is running, or choose another address with MASTER_ADDR "
            f"and MASTER_PORT{see('could-not-reach-the-store')}"
        ) from error


def _open_on_host(job: str, placement: Placement, timeout: timedelta) -> dist.Store:
    if sys.platform != "linux":
        raise LaunchError(
            f"{placement.launcher} provides no rendezvous address, and this system has no abstract "
            f"sockets; set MASTER_ADDR={LOOPBACK} and MASTER_PORT to a free port"
        )
    name = "\0" + rendezvous_name(job)
    if placement.rank == 0:
        store = loopback_store()
        _serve_port(name, store.port, placement.size - 1, timeout.total_seconds())
    else:
        port = _request_port(name, placement, timeout.total_seconds())
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    store.set_timeout(timeout)
    return store


def _serve_port(name: str, port: int, others: int, timeout_s: float) -> None:
    """Listen on `name`, and start a thread that sends `port` to `others` ranks."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(
                f"cannot open a socket for the ranks of this job: {error.strerror}; set MASTER_ADDR={LOOPBACK} and "
                "MASTER_PORT to a free port"
            ) from error
        raise LaunchError(
            f"another process already serves the ranks of this job: {error}; if two programs of one job call "
            f"farandole.init() at the same time, set a different MASTER_ADDR and MASTER_PORT for each program"
        ) from error
    listener.listen(others)

    def serve() -> None:
        deadline = time.monotonic() + timeout_s
        served = 0
        with listener:
            while served < others and (remaining_s := deadline - time.monotonic()) > 0:
                listener.settimeout(remaining_s)
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    return  # the missing rank and this rank's store report the timeout
                with peer, contextlib.suppress(ConnectionError):  # the rank has just died
                    if _user_of(peer) == os.getuid():
                        peer.sendall(b"%d\n" % port)
                        served += 1

    threading.Thread(target=serve, name="farandole-bootstrap", daemon=True).start()


def _request_port(name: str, placement: Placement, timeout_s: float) -> int:
    """Request the port of rank 0's store; retry until rank 0 listens."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                peer.connect(name)
                if _user_of(peer) == os.getuid() and (answer := peer.recv(16)):
                    return int(answer)
            except OSError:  # rank 0 is not listening yet
                time.sleep(0.02)
    raise LaunchError(
        f"rank {placement.rank} of {placement.size} could not reach rank 0 of its job on this host within "
        f"{timeout_s:g} s ({placement.launcher}); check that rank 0 is running and calls "
        f"farandole.init(){see('could-not-reach-the-store')}"
    )


def _user_of(peer: socket.socket) -> int:
    """Return the user id of the peer process, as reported by the kernel."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
