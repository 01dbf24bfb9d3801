"""Asynchronous work: one lane per group, in which calls run one after the other in the order of issue.

A call that nobody waits for runs on the lane's own thread.  Whoever waits for a call helps: if the lane
is idle, the waiting thread runs the next calls itself, which spares two changes of thread.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from farandole.comm.errors import RankLate
from farandole.native import BACKGROUND, MAIN_THREAD

Call = Callable[[int], None]
"""A blocking call of the core; its argument are the flags of farandole.native."""

# Callbacks of futures may themselves wait for collectives (PowerSGD's do), so they must not hold a lane up.
_callbacks = ThreadPoolExecutor(max_workers=64, thread_name_prefix="farandole-callback")


def flags_here() -> int:
    """The flags for a call that this thread makes and waits for."""
    return MAIN_THREAD if threading.current_thread() is threading.main_thread() else 0


class LaneFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A torch future that is completed in place unless somebody attached a callback."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.RLock()
        self._has_callbacks = False

    def then(self, callback: Callable[..., Any]) -> torch.futures.Future[Any]:
        """As torch's."""
        with self._guard:
            self._has_callbacks = True
            return super().then(callback)

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        """As torch's."""
        with self._guard:
            self._has_callbacks = True
            super().add_done_callback(callback)

    def complete(self, tensors: list[torch.Tensor], error: BaseException | None) -> None:
        """Set the result or the error, on another thread if callbacks would run here."""
        with self._guard:
            if not self._has_callbacks:
                self._set(tensors, error)
                return
        _callbacks.submit(self._set, tensors, error)

    def _set(self, tensors: list[torch.Tensor], error: BaseException | None) -> None:
        if error is None:
            self.set_result(tensors)
        else:
            self.set_exception(error)  # type: ignore[arg-type]


class _FarandoleWork(dist.Work):
    """What all our works have in common: the tensors that they write, and how they end."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._error: BaseException | None = None

    def is_success(self) -> bool:
        """Whether it is complete and without error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error, if it is complete and failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it wrote."""
        return self._tensors

    def synchronize(self) -> None:
        """The same as `wait`: there are no streams on a CPU."""
        self.wait()


class CompletedWork(_FarandoleWork):
    """Work that was done before the call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future of the tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class LaneWork(_FarandoleWork):
    """One call in a lane."""

    def __init__(self, lane: Lane, call: Call, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._lane = lane
        self._call: Call | None = call
        self._running = _thread.allocate_lock()  # held until the call is complete
        self._running.acquire()
        self._complete = False
        self._future: LaneFuture | None = None
        self._future_lock = _thread.allocate_lock()

    def run(self, flags: int) -> None:
        """Make the call; the lane is held by this thread."""
        assert self._call is not None
        try:
            self._call(flags)
        except BaseException as error:  # kept for whoever waits, KeyboardInterrupt too
            self._error = error
        self._call = None
        with self._future_lock:
            self._complete = True
            future = self._future
        self._running.release()
        if future is not None:
            future.complete(self._tensors, self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call is complete, or `timeout`; raise its error."""
        if timeout is not None and timeout.total_seconds() > 0:
            if not self._running.acquire(timeout=timeout.total_seconds()):
                raise RankLate(f"the work was not complete within {timeout.total_seconds():g} s")
            self._running.release()
        else:
            while not self._complete and self._lane.help():
                pass
            with self._running:
                pass
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._complete

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors."""
        with self._future_lock:
            if self._future is not None:
                return self._future
            future = self._future = LaneFuture()
            complete = self._complete
        if complete:
            future.complete(self._tensors, self._error)
        return future


class Lane:
    """Runs the calls of one group in order, on its own thread or on that of whoever waits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[LaneWork] = deque()
        self._running = _thread.allocate_lock()
        self._tickets: SimpleQueue[bool] = SimpleQueue()  # one per work, for the thread
        self._thread: threading.Thread | None = None

    def run(self, call: Call, tensors: Sequence[torch.Tensor]) -> dist.Work:
        """Make a call now and return when it is done; after those that were issued before."""
        if self._waiting or not self._running.acquire(False):
            self.submit(call, tensors).wait()
            return COMPLETED
        try:
            call(flags_here())
        finally:
            self._running.release()
        return COMPLETED

    def submit(self, call: Call, tensors: Sequence[torch.Tensor]) -> LaneWork:
        """Have a call made in its turn."""
        work = LaneWork(self, call, tensors)
        self._waiting.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=f"farandole-{self._name}", daemon=True)
            self._thread.start()
        self._tickets.put(True)
        return work

    def help(self) -> bool:
        """Run the next call on this thread, if there is one and nobody is running any."""
        if not self._running.acquire(False):
            return False
        try:
            return self._run_next(flags_here())
        finally:
            self._running.release()

    def close(self) -> None:
        """End the thread after the calls that were issued."""
        self._tickets.put(False)

    def _run_next(self, flags: int) -> bool:
        try:
            work = self._waiting.popleft()
        except IndexError:
            return False
        work.run(flags)
        return True

    def _main(self) -> None:
        while self._tickets.get():
            with self._running:
                self._run_next(BACKGROUND)


COMPLETED = CompletedWork([])
