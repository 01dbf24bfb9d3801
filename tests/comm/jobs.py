"""Jobs whose ranks may be killed: each rank is a separate process, forked after torch has been loaded.

with Job(2, function, args) as job:      # function(rank, size, tell, *args)
    job.hear(1)                          # the object that rank 1 passed to tell(...)
    job.kill(1)
    end = job.end(0)                     # the exception or result of rank 0, and the time of its end
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.namespaces import Host
from farandole.launch.bootstrap import loopback_store
from farandole.launch.hosts import LOOPBACK
from tests.comm.hosts import on_hosts
from tests.forking import CONTEXT

SOON_S = 2.0
_PORT = 29_400  # free, because each network namespace is new


@dataclass(frozen=True)
class End:
    """The exception or result with which a rank's function ended."""

    kind: str  # the name of its exception's class, or "returned"
    text: str
    at: float  # seconds of the monotonic clock, which all processes share
    trace: str = ""


@dataclass(frozen=True)
class Place:
    """The host on which a rank runs, and the store for rendezvous."""

    port: int
    host: int | None
    hosts: Sequence[int] | None
    namespaces: tuple[Host, ...]

    def store(self, rank: int) -> dist.TCPStore:
        """Return the store of the job; with namespaces, rank 0 serves the store."""
        if not self.namespaces:
            return dist.TCPStore(LOOPBACK, self.port, is_master=False)
        return dist.TCPStore(self.namespaces[0].address, self.port, is_master=rank == 0)

    def enter(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Move this process to its host; without namespaces, the host is simulated within the context."""
        if self.namespaces and self.host is not None:
            self.namespaces[self.host].enter()
            return on_hosts([host.name for host in self.namespaces], self.host)
        if self.hosts:
            return on_hosts(self.hosts, rank)
        return contextlib.nullcontext()


class Job:
    """A job whose ranks run one function with the backend `farandole`."""

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60,
        hosts: Sequence[int] | None = None,
        namespaces: Sequence[Host] = (),
        before: Callable[[], None] | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            hosts: the host number of each rank.
            namespaces: the network namespaces that represent the hosts; by default, hosts are simulated in one network.
            before: a function that each rank calls before its group is created.
        """
        self._store = None if namespaces else loopback_store()
        self.ranks: list[tuple[Any, Connection]] = []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            host = hosts[rank] if hosts else None
            place = Place(self._store.port if self._store else _PORT, host, hosts, tuple(namespaces))
            process = CONTEXT.Process(
                target=_rank,
                args=(rank, size, place, timeout_s, theirs, before, function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: Any) -> None:
        for process, pipe in self.ranks:
            process.join(0 if any(error) else 5)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return self.ranks[rank][0].pid

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal to a rank, and return the time at which it was sent."""
        os.kill(self.pid(rank), number)
        return time.monotonic()

    def hear(self, rank: int, timeout_s: float = 30) -> Any:
        """Return the next object that the rank passes to `tell`."""
        pipe = self.ranks[rank][1]
        assert pipe.poll(timeout_s), f"rank {rank} sent no message within {timeout_s:g} s"
        said = pipe.recv()
        assert not isinstance(said, End), said.trace or said
        return said

    def end(self, rank: int, timeout_s: float = 20) -> End:
        """Wait until the rank's function ends, discard its messages, and return its exception or result."""
        pipe = self.ranks[rank][1]
        deadline = time.monotonic() + timeout_s
        while pipe.poll(max(0, deadline - time.monotonic())):
            try:
                said = pipe.recv()
            except EOFError:
                process = self.ranks[rank][0]
                process.join(5)
                raise AssertionError(
                    f"rank {rank} ended with exit code {process.exitcode}, without an exception or a result"
                ) from None
            if isinstance(said, End):
                return said
        raise AssertionError(f"rank {rank} did not end within {timeout_s:g} s")

    def exit_code(self, rank: int, timeout_s: float = 10) -> int | None:
        """Return the exit code of the rank's process; negative if a signal ended the process."""
        process = self.ranks[rank][0]
        process.join(timeout_s)
        return process.exitcode


def left_behind() -> set[str]:
    """Return the files in shared memory, except those of Python and MPI, which other tests use at the same time."""
    others = ("sem.mp-", "pym-", "psm_", "mpich_")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}


def survivors_of(
    job: Job, victim: int, since: float, kind: str, *patterns: str, within_s: float = SOON_S
) -> None:
    """Assert that the other ranks raised `kind` in time, with messages that name the victim and match `patterns`."""
    for rank in range(len(job.ranks)):
        if rank == victim:
            continue
        end = job.end(rank)
        assert end.kind == kind, end.trace or end
        assert end.at - since < within_s, f"rank {rank} raised after {end.at - since:.1f} s"
        for pattern in (rf"^rank {victim} \(process {job.pid(victim)}( on \w+)?(, [^)]*)?\) ", *patterns):
            assert re.search(pattern, end.text), f"{pattern} not in: {end.text}"


def _rank(
    rank: int,
    size: int,
    place: Place,
    timeout_s: float,
    pipe: Connection,
    before: Callable[[], None] | None,
    function: Callable[..., Any],
    args: Any,
) -> None:
    if before is not None:
        before()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    with place.enter(rank):
        dist.init_process_group(
            "farandole",
            store=place.store(rank),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    try:
        result = function(rank, size, pipe.send, *args)
    except SystemExit:
        raise
    except BaseException as error:
        pipe.send(End(type(error).__name__, str(error), time.monotonic(), traceback.format_exc()))
    else:
        pipe.send(End("returned", repr(result), time.monotonic()))
