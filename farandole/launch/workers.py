"""Start worker processes that form a group with this process, which is rank 0.

    with Workers("my.worker", ranks=2, name="my group") as workers:
        workers.join().barrier()

and in `my/worker.py`:

    link = Link(sys.argv[1])
    link.join().barrier()

A socket connects each worker to this process.  When this process ends, for any reason, the kernel closes the socket, and
the worker ends.  The workers do not receive Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from farandole.comm.backend.groups import connect
from farandole.comm.communicator import Communicator
from farandole.comm.endpoint import CannotShareMemory
from farandole.launch.bootstrap import loopback_store
from farandole.launch.cores import usable_cores
from farandole.launch.hosts import LOOPBACK
from farandole.launch.placement import LaunchError
from farandole.launch.reports import describe_status

TIMEOUT_S = 600.0
"""How long, in seconds, a rank waits for the others in a collective."""
_READY, _GO = b"r", b"g"


class Workers:
    """Processes that run a module as ranks 1, 2, ... of a group, in which this process is rank 0.

    Until `close` is called, this process uses at most as many threads as each worker, unless OMP_NUM_THREADS is set.

    Args:
        module: the module to run; it must pass its command-line argument to `Link`.
        ranks: the number of ranks, including this process.
        name: the name of the group in error messages.
    """

    def __init__(self, module: str, ranks: int, name: str) -> None:
        self._ranks, self._name = ranks, name
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._threads = torch.get_num_threads()
        threads = max(1, usable_cores() // ranks)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        self._end = weakref.finalize(self, _kill, self._processes, self._sockets)
        for _ in range(1, ranks):
            own, other = socket.socketpair()
            with other:
                descriptor = other.fileno()
                # in a session of its own, a worker does not receive Ctrl-C
                process = subprocess.Popen(
                    [sys.executable, "-m", module, str(descriptor)],
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=(descriptor,),
                    start_new_session=True,
                )
            self._processes.append(process)
            self._sockets.append(own)
        if not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(min(self._threads, threads))

    def join(self) -> Communicator:
        """Wait for the workers, and return the communicator of all ranks.

        Raises:
            LaunchError: if a worker has ended, or the processes cannot share memory.
        """
        self._store = loopback_store()  # an attribute, because workers may read the store later
        for rank, link in enumerate(self._sockets, 1):
            if link.recv(1) != _READY:
                raise LaunchError(f"{self.describe(rank)}; see its error message above")
            link.sendall(json.dumps([self._store.port, rank, self._ranks, self._name]).encode() + b"\n")
        return _connect(self._store, 0, self._ranks, self._name)

    def resume(self) -> None:
        """Wake the workers, which are waiting in `Link.wait`.

        Raises:
            LaunchError: if a worker has ended.
        """
        for rank, link in enumerate(self._sockets, 1):
            try:
                link.sendall(_GO)
            except OSError:
                raise LaunchError(self.describe(rank)) from None
        if not self._sockets:
            raise LaunchError(
                f"cannot resume {self._name}: close() has stopped the processes; create the object again"
            )

    def describe(self, rank: int) -> str:
        """Return text such as `rank 1 (process 4711) ended with exit status 1`."""
        process = self._processes[rank - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        status = process.poll()
        ended = "does not answer" if status is None else describe_status(status)
        return f"rank {rank} (process {process.pid}) {ended}"

    def close(self) -> None:
        """End the workers.  Further calls have no effect."""
        if self._end.alive:
            self._end()
            torch.set_num_threads(self._threads)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Link:
    """Connects a worker to rank 0, the process that has started the worker.

    Args:
        descriptor: the command-line argument of the worker's module.
    """

    def __init__(self, descriptor: str) -> None:
        self._socket = socket.socket(fileno=int(descriptor))
        self._resumed: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def join(self) -> Communicator:
        """Return the communicator of all ranks.  From this call on, this process ends when rank 0 ends.

        Import all modules before this call.
        """
        self._socket.sendall(_READY)
        with self._socket.makefile("rb", buffering=0) as lines:
            line = lines.readline()
        if not line:
            os._exit(1)
        port, rank, ranks, name = json.loads(line)
        threading.Thread(target=self._watch, name="farandole-link", daemon=True).start()
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
        return _connect(store, rank, ranks, name)

    def wait(self) -> None:
        """Wait until rank 0 calls `Workers.resume`."""
        self._resumed.get()

    def waits(self) -> Iterator[None]:
        """Yield once for each call to `Workers.resume`."""
        while True:
            self.wait()
            yield

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            while received := self._socket.recv(1):
                self._resumed.put(received)
        os._exit(1)


def _connect(store: dist.Store, rank: int, ranks: int, name: str) -> Communicator:
    try:
        return connect(store, rank, ranks, timedelta(seconds=TIMEOUT_S), name)
    except CannotShareMemory as reason:
        raise LaunchError(
            f"{name}: the processes cannot share memory: {reason}; start the ranks with farandole launch"
        ) from None


def _kill(processes: list[subprocess.Popen[bytes]], sockets: list[socket.socket]) -> None:
    """Kill the workers, which have no state to save."""
    for process in processes:
        process.kill()
    for link in sockets:
        link.close()
    for process in processes:
        process.wait()
    del processes[:], sockets[:]
