"""Thread-safe access to MPI, and progress of MPI requests.

MPI runs at the thread level "serialized", so one lock protects every MPI call.  The lock is held only briefly: a thread
starts an operation and then tests it until it is complete.  Calls from several groups therefore do not block each
other, even if threads make them in a different order on each rank.  One background thread tests operations, mostly
messages, that no other thread is waiting for.

Open MPI's non-blocking collectives are two to three times slower than its blocking collectives (measured with version
5.0 on one host).  Before a large collective, the ranks therefore agree in a small non-blocking call that all ranks
have arrived and no rank has another blocking call pending.  The large collective may then block inside MPI.  A blocking
MPI call cannot be interrupted, so a watchdog ends the process when the timeout expires.  Asynchronous calls never block
inside MPI, because a blocked thread would occupy a core that the main thread needs (DDP is three times slower with
blocking calls).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any, Protocol

from farandole.comm.mpi.library import load, loaded
from farandole.comm.notices import warn

SPINS = 30
"""How many times a waiting thread tests an operation before the thread yields its core."""
YIELDING_S = 0.005
"""How long a waiting thread yields its core before it sleeps between tests, in seconds; longer for large transfers."""
MOVED_PER_S = 50e6
NAP_S, LONG_NAP_S = 50e-6, 500e-6
BACKGROUND_NAP_S = 20e-6
"""How long a thread sleeps between tests in an asynchronous call, in seconds.

The thread releases the interpreter lock while it sleeps.
"""
BURST = 16
"""The number of tests between two sleeps; MPICH transfers 16 KiB in each test."""
IDLE_S = 1.0
GUARD_S = 0.2
"""Seconds between deadline checks during a blocking call."""


class Pending(Protocol):
    """An operation that the background thread tests until it is complete."""

    def advance(self) -> bool:
        """Test the operation and return whether it is complete.  The caller must hold the engine's lock."""


class Engine:
    """Controls access to MPI for all groups in this process."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.lock = threading.Lock()
        self.prefers_blocking = mpi.get_vendor()[0] == "Open MPI"
        self.largest_count = 2**63 - 1 if mpi.Get_version() >= (4, 0) else 2**31 - 1
        self._alone = threading.Condition()
        self._blocking = 0  # the number of calls that may block
        self._making_groups = 0
        self._open: list[Pending] = []
        self._wake = threading.Condition()
        self._asleep = False
        self._closing = False
        self._thread: threading.Thread | None = None
        # the deadline of the blocking call, and a function that describes the delay
        self._limit: tuple[float, Callable[[], str]] | None = None
        self._watchdog: threading.Thread | None = None
        # runs after all groups have been left (see comm/ending.py) and before mpi4py finalizes MPI
        Finalize(None, self._end, exitpriority=-1)

    def complete_soon(self, request: Any, spins: int = SPINS) -> bool:
        """Test a request up to `spins` times; return whether it is complete."""
        lock, test = self.lock, request.Test
        for _ in range(spins):
            with lock:
                if test():
                    return True
        return False

    def complete(
        self,
        request: Any,
        seconds: float,
        *,
        transfer: int = 0,
        background: bool = False,
        each_turn: Callable[[float], None] | None = None,
    ) -> bool:
        """Test a request until it is complete; return False if `seconds` pass first.

        Args:
            request: The MPI request.
            seconds: The time limit.
            transfer: The number of bytes; for a large transfer, the thread yields for longer before it sleeps.
            background: Whether the call is asynchronous; if True, this thread sleeps between tests to free its core.
            each_turn: A function to call between tests, while this thread does not hold the lock.  Its argument is the
                time waited so far, in seconds.
        """
        started = time.monotonic()
        yielding = YIELDING_S + transfer / MOVED_PER_S
        tests = BURST if background else 1
        while not self.complete_soon(request, tests):
            waited = time.monotonic() - started
            if waited > seconds:
                return False
            if each_turn is not None:
                each_turn(waited)
            if waited > yielding:
                tests = BURST
                time.sleep(NAP_S if waited < yielding + IDLE_S else LONG_NAP_S)
            elif background:
                time.sleep(BACKGROUND_NAP_S)
            else:
                os.sched_yield()
        return True

    # ---- calls that may block inside MPI ----

    def try_alone(self) -> bool:
        """Try to acquire the exclusive right to make blocking MPI calls; return whether this succeeded.

        The attempt fails if another thread has this right or is creating a group.
        """
        with self._alone:
            if self._blocking or self._making_groups:
                return False
            self._blocking = 1
            return True

    def leave_alone(self) -> None:
        """Release the exclusive right acquired by `try_alone`."""
        with self._alone:
            self._blocking = 0
            self._alone.notify_all()

    @contextmanager
    def limited(self, seconds: float, why: Callable[[], str]) -> Iterator[None]:
        """End the process if the `with` block takes longer than `seconds`, because MPI cannot be interrupted."""
        if self._watchdog is None:
            self._watchdog = threading.Thread(target=self._guard, name="farandole-mpi-watchdog", daemon=True)
            self._watchdog.start()
        self._limit = time.monotonic() + seconds, why
        try:
            yield
        finally:
            self._limit = None

    def _guard(self) -> None:
        while not self._closing:
            time.sleep(GUARD_S)
            limit = self._limit
            if limit is not None and time.monotonic() > limit[0]:
                warn(f"{limit[1]()}; the MPI call cannot be interrupted, so this process exits")
                os._exit(1)

    @contextmanager
    def making_group(self) -> Iterator[None]:
        """Wait for blocking calls to finish, and prevent new blocking calls during the `with` block.

        The block creates a communicator; this operation also blocks inside MPI.
        """
        with self._alone:
            self._alone.wait_for(lambda: not self._blocking)
            self._making_groups += 1
        try:
            yield
        finally:
            with self._alone:
                self._making_groups -= 1

    # ---- operations that no thread is waiting for ----

    def watch(self, pending: Pending) -> None:
        """Make the background thread test `pending` until it is complete."""
        with self._wake:
            self._open.append(pending)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._main, name="farandole-mpi", daemon=True)
                self._thread.start()
            elif self._asleep:
                self._wake.notify()

    def abandon(self, request: Any) -> None:
        """Keep a pending request, and its memory, alive until the request is complete.

        The callers' local variables hold the tensors, so this method keeps the callers' stack frames alive.
        """
        self.watch(Abandoned(request, sys._getframe(1), self.mpi.Exception))

    def _main(self) -> None:
        last_used = time.monotonic()
        while not self._closing:
            completed = sum(self._advance() for _ in range(BURST))
            now = time.monotonic()
            if self._open:
                last_used = now if completed else last_used
                time.sleep(NAP_S if now < last_used + IDLE_S else LONG_NAP_S)
            elif now < last_used + IDLE_S:
                time.sleep(10 * NAP_S)
            else:
                with self._wake:
                    self._asleep = True
                    self._wake.wait_for(lambda: self._open or self._closing)
                    self._asleep = False
                last_used = time.monotonic()

    def _advance(self) -> int:
        """Test the pending operations once; return how many have completed."""
        completed = 0
        for pending in list(self._open):
            with self.lock:
                complete = pending.advance()
            if complete:
                self._open.remove(pending)
                completed += 1
        return completed

    def _end(self) -> None:
        """Stop the background thread at exit; abort the job if this rank failed or requests are pending."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(1.0)
        failed = getattr(sys, "last_value", None) is not None
        with self.lock:
            unfinished = any(not pending.advance() for pending in self._open)
        if (failed or unfinished) and self.mpi.COMM_WORLD.Get_size() > 1 and not self.mpi.Is_finalized():
            if unfinished and not failed:
                warn("MPI calls that were abandoned after an error are still pending, so the job is aborted")
            sys.stdout.flush()
            sys.stderr.flush()
            self.mpi.COMM_WORLD.Abort(1)  # otherwise, MPI_Finalize would wait for all ranks


class Abandoned:
    """An abandoned request, and the stack frame that keeps its memory alive."""

    def __init__(self, request: Any, frame: Any, error: type[Exception]) -> None:
        self._request = request
        self._frame = frame
        self._error = error

    def advance(self) -> bool:
        """Test the request; return whether it has completed or failed."""
        try:
            return bool(self._request.Test())
        except self._error:
            return True


@functools.cache
def _engine() -> Engine:
    return Engine(load())


def engine() -> Engine:
    """Return this process's engine; raise `MpiUnavailable` if MPI cannot be used."""
    loaded()
    return _engine()
