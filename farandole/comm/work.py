"""Asynchronous work: one lane per group, in which calls run one after the other in the order of issue.

A call that nobody waits for runs on the lane's own thread.  Whoever waits for a call helps: if the lane
is idle, the waiting thread runs the next calls itself, which spares two changes of thread.

The callbacks of a call's future run inside the lane, right after the call, and the calls that they issue
run at once, before those that wait.  So they keep their place in the order whether a callback was attached
before its call was complete or after, when it runs in the thread that attaches it: hooks of DDP that
communicate in callbacks (PowerSGD's do) issue the same order on all ranks.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from farandole.comm.errors import CommunicationError, RankLate
from farandole.native import BACKGROUND, MAIN_THREAD

Call = Callable[[int], None]
"""A blocking call of the core; its argument are the flags of farandole.native."""


def flags_here() -> int:
    """The flags for a call that this thread makes and waits for."""
    return MAIN_THREAD if threading.current_thread() is threading.main_thread() else 0


def seconds_of(timeout: timedelta | None) -> float | None:
    """A timeout of torch's in seconds; None where none was given (torch also says that with 0 and -1 ms)."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None


class FarandoleWork(dist.Work):
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

    def outcome(self) -> list[torch.Tensor]:
        """The tensors of complete work; raises its error."""
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:  # Ctrl-C, which was for the thread that it hit
            raise CommunicationError(f"the work was interrupted by {type(self._error).__name__}")
        return self._tensors


class CompletedWork(FarandoleWork):
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


class OutcomeFuture:
    """A torch future of the outcome of work.

    `torch.futures.Future.set_exception` is seen by Python only; C++ code, DDP's reducer for one, would take the
    exception for a result.  What a callback raises is seen by both.
    """

    def __init__(self, work: FarandoleWork) -> None:
        self._source: torch.futures.Future[None] = torch.futures.Future()
        self.future: torch.futures.Future[Any] = self._source.then(lambda _: work.outcome())

    def complete(self) -> None:
        """Complete it, and run its callbacks on this thread."""
        self._source.set_result(None)


class LaneWork(FarandoleWork):
    """One call in a lane."""

    def __init__(self, lane: Lane, call: Call, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._lane = lane
        self._call: Call | None = call
        self._inference = torch.is_inference_mode_enabled()  # its tensors can be written in it only
        self._running = _thread.allocate_lock()  # held until the call is complete
        self._running.acquire()
        self._complete = False
        self._outcome: OutcomeFuture | None = None
        self._outcome_lock = _thread.allocate_lock()

    def run(self, flags: int) -> None:
        """Make the call, then the callbacks that wait for it; the lane is held by this thread."""
        call, self._call = self._call, None
        try:
            if call is None:
                pass
            elif torch.is_inference_mode_enabled() == self._inference:
                call(flags)
            else:
                with torch.inference_mode(self._inference):
                    call(flags)
        except BaseException as error:  # kept for whoever waits, KeyboardInterrupt too
            self._error = error
        with self._outcome_lock:
            self._complete = True
            outcome = self._outcome
        self._running.release()
        if outcome is not None:
            self._lane.run_callbacks(outcome)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call is complete, or `timeout`; raise its error."""
        seconds = seconds_of(timeout)
        if seconds is None or self._lane.is_mine():
            while not self._complete and self._lane.help():
                pass
            self._running.acquire()
        elif not self._running.acquire(timeout=seconds):
            raise RankLate(f"the work was not complete within {seconds:g} s: {self._lane.whereabouts()}")
        self._running.release()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._complete

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors."""
        with self._outcome_lock:
            if self._outcome is None:
                self._outcome = OutcomeFuture(self)
                complete = self._complete
            else:
                complete = False
        if complete:
            self._outcome.complete()
        return self._outcome.future


class Lane:
    """Runs the calls of one group in order, on its own thread or on that of whoever waits.

    `whereabouts` tells a person for whom the call under way waits.
    """

    def __init__(self, name: str, whereabouts: Callable[[], str]) -> None:
        self.whereabouts = whereabouts
        self._name = name
        self._waiting: deque[LaneWork] = deque()
        self._running = _thread.allocate_lock()
        self._closed = False
        self._caller: int | None = None  # the thread that runs callbacks
        self._tickets: SimpleQueue[bool] = SimpleQueue()  # one per work, for the thread
        self._thread: threading.Thread | None = None

    def run(self, call: Call, tensors: Sequence[torch.Tensor]) -> dist.Work:
        """Make a call now and return when it is done; after those that were issued before."""
        if not self.enter():
            self.submit(call, tensors).wait()
            return COMPLETED
        try:
            call(flags_here())
        finally:
            self.leave()
        return COMPLETED

    def enter(self) -> bool:
        """Take the lane for this thread if nothing waits or runs in it; `leave` gives it back."""
        return not self._waiting and self._running.acquire(False)

    def leave(self) -> None:
        """Give the lane back after `enter`."""
        self._running.release()

    def is_mine(self) -> bool:
        """Whether this thread is in a callback of a work of this lane."""
        return self._caller == _thread.get_ident()

    def submit(self, call: Call, tensors: Sequence[torch.Tensor]) -> LaneWork:
        """Have a call made in its turn; a callback's at once."""
        if self._closed:
            raise CommunicationError("the group was destroyed; no call can be made any more")
        work = LaneWork(self, call, tensors)
        if self.is_mine():
            work.run(flags_here())
            return work
        self._waiting.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=f"farandole-{self._name}", daemon=True)
            self._thread.start()
        self._tickets.put(True)
        return work

    def help(self) -> bool:
        """Run the next call on this thread, if there is one and nobody else is running any."""
        if self.is_mine():
            return self._run_next(flags_here())
        if not self._running.acquire(False):
            return False
        try:
            return self._run_next(flags_here())
        finally:
            self._running.release()

    def run_callbacks(self, outcome: OutcomeFuture) -> None:
        """Complete a future on this thread, which holds the lane: its callbacks' calls come before those that wait."""
        outer, self._caller = self._caller, _thread.get_ident()
        try:
            outcome.complete()
        finally:
            self._caller = outer

    def close(self, patience_s: float) -> bool:
        """Complete the calls that were issued and end the thread; False if that takes longer than `patience_s`.

        After that the lane stays taken, so that no other thread makes a call that this one has not seen.
        """
        if self._closed:
            return True
        if self._thread is not None and not self.is_mine():
            self._tickets.put(False)
            self._thread.join(patience_s)
            if self._thread.is_alive():
                return False
        self._closed = self._running.acquire(timeout=patience_s)
        return self._closed

    def _run_next(self, flags: int) -> bool:
        try:
            work = self._waiting.popleft()
        except IndexError:
            return False
        work.run(flags)
        error = work.exception()
        if error is not None and not isinstance(error, Exception):
            raise error  # Ctrl-C is for this thread, whoever issued the work
        return True

    def _main(self) -> None:
        while self._tickets.get():
            with self._running:
                self._run_next(BACKGROUND)


COMPLETED = CompletedWork([])
