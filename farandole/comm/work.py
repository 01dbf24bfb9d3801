"""Asynchronous work: each group has a queue, which runs the group's calls one at a time, in issue order.

The queue's thread runs calls that no thread is waiting for.  If no call is running, a thread that waits for a call
runs the queued calls itself, which saves two thread switches.

A callback on a call's future runs right after the call, before the next queued call.  Calls issued by a callback
also run immediately.  A callback attached to a completed call runs immediately on the thread that attaches it.
The order of calls is therefore the same on all ranks.  DDP hooks that communicate in callbacks, such as PowerSGD,
depend on this.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from farandole import native
from farandole._troubleshooting import see
from farandole.comm.dynamo import exclude_from_dynamo
from farandole.comm.errors import CommunicationError, RankLate
from farandole.native import BACKGROUND, MAIN_THREAD

Call = Callable[[int], Any]
"""A blocking call to an implementation; its argument is a combination of `farandole.native` flags."""

_main_thread = threading.main_thread().ident


def _after_fork() -> None:
    global _main_thread
    _main_thread = _thread.get_ident()


os.register_at_fork(after_in_child=_after_fork)


def flags_here() -> int:
    """Return the `farandole.native` flags for a blocking call from this thread."""
    return MAIN_THREAD if _thread.get_ident() == _main_thread else 0


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return `timeout` in seconds, or None for no timeout.

    Torch may also pass 0 ms or -1 ms to request no timeout.
    """
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None


@exclude_from_dynamo
class FarandoleWork(dist.Work):
    """The base class of work objects; stores the output tensors and the error."""

    _tensors: list[torch.Tensor]
    _error: BaseException | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        exclude_from_dynamo(cls)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def is_success(self) -> bool:
        """Return whether the work has completed without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error if the work has failed, else None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._tensors

    def synchronize(self) -> None:
        """Block until the work is complete; CPUs have no streams to synchronize."""
        self.wait()

    def outcome(self) -> list[torch.Tensor]:
        """Return the output tensors, or raise the error if the work failed.  The work must be complete."""
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:  # Ctrl-C itself is raised in the thread that received it
            raise CommunicationError(f"the work was interrupted by {type(self._error).__name__}")
        return self._tensors


class CompletedWork(FarandoleWork):
    """Work that is already complete when it is created."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True immediately."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future whose value is the list of output tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class FutureWork(FarandoleWork):
    """Work of a torch process group (`first`), followed by a callback.  `future` completes after the callback."""

    def __init__(
        self, first: dist.Work, future: torch.futures.Future[Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(tensors)
        self._first, self._future = first, future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the callback has returned; raise any error from the work or the callback.

        `timeout` does not apply to the callback.
        """
        if timeout is None:
            self._first.wait()
        else:
            self._first.wait(timeout)
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the callback has returned or failed."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes after the callback; its value is the list of output tensors."""
        return self._future


class OutcomeFuture:
    """A torch future for the outcome of a work object.

    C++ code such as DDP's reducer treats an exception from `torch.futures.Future.set_exception` as a result.  This
    class therefore raises the exception in a callback, so that both Python and C++ code receive the error.
    """

    def __init__(self, work: FarandoleWork) -> None:
        self._source: torch.futures.Future[None] = torch.futures.Future()
        self.future: torch.futures.Future[Any] = self._source.then(lambda _: work.outcome())

    def complete(self) -> None:
        """Complete the future and run its callbacks on this thread."""
        self._source.set_result(None)


class QueuedWork(FarandoleWork):
    """One call in a work queue."""

    def __init__(self, queue: WorkQueue, call: Call, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._queue = queue
        self._call: Call | None = call
        self._inference = torch.is_inference_mode_enabled()  # required for writing inference tensors
        self._running = _thread.allocate_lock()  # held until the call is complete
        self._running.acquire()
        self._complete = False
        self._outcome: OutcomeFuture | None = None
        self._outcome_lock = _thread.allocate_lock()
        self._unseen: weakref.finalize[..., Any] | None = None  # reports the error if no caller reads it

    def run(self, flags: int) -> None:
        """Run the call and then its callbacks.  The calling thread must have acquired the queue."""
        call, self._call = self._call, None
        try:
            if call is None:
                pass
            elif torch.is_inference_mode_enabled() == self._inference:
                call(flags)
            else:
                with torch.inference_mode(self._inference):
                    call(flags)
        except BaseException as error:  # `wait` raises the error, including KeyboardInterrupt
            self._error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            words = f"an asynchronous call failed, and no `wait()` reported the error: {type(error).__name__}: {error}"
            self._unseen = weakref.finalize(self, self._queue.raise_at_next_call, words)
            self._unseen.atexit = False
        with self._outcome_lock:
            self._complete = True
            outcome = self._outcome
        self._running.release()
        if outcome is not None:
            self._queue.run_callbacks(outcome)
        # the error's traceback keeps this frame alive, which must not keep the work alive: see `_unseen`
        del self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the call is complete; raise its error if it failed, or `RankLate` on timeout."""
        seconds = seconds_of(timeout)
        if self._queue.invalid and not self._complete:
            raise CommunicationError(self._queue.invalid)
        if not self._complete:
            self._queue.refuse_in_handler()
        if seconds is None or self._queue.in_callback():
            while not self._complete and self._queue.help():
                pass
            self._running.acquire()
        elif not self._running.acquire(timeout=seconds):
            raise RankLate(
                f"the work did not complete within the timeout of {seconds:g} s: {self._queue.whereabouts()}"
            )
        self._running.release()
        self._see()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the call has completed or failed."""
        return self._complete

    def _see(self) -> None:
        if self._unseen is not None:
            self._unseen.detach()

    def outcome(self) -> list[torch.Tensor]:
        """Return the output tensors, or raise the error if the work failed.  The work must be complete."""
        self._see()
        return super().outcome()

    def exception(self) -> BaseException | None:
        """Return the error if the call has failed, else None.  This marks the error as reported."""
        self._see()
        return super().exception()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of output tensors."""
        with self._outcome_lock:
            if self._outcome is None:
                self._outcome = OutcomeFuture(self)
                complete = self._complete
            else:
                complete = False
        if complete:
            self._outcome.complete()
        return self._outcome.future


class Tickets:
    """Wakes the queue's thread if no other thread starts a queued call within a short delay.

    Each call posts a ticket, and the thread that starts the call takes the ticket.  The queue's thread waits in C
    without holding the GIL (native/tickets.c).
    """

    def __init__(self) -> None:
        core = native.library()
        handle = core.frd_tickets_new()
        if not handle:
            raise OSError(
                "cannot create the queue for asynchronous calls: out of memory or file descriptors; check `ulimit -n`"
            )
        # not at exit, because a thread may use the tickets until the process ends
        weakref.finalize(self, core.frd_tickets_free, handle).atexit = False
        # indexing returns functions without argument types, so ctypes does not convert arguments
        names = ("post", "take", "close", "wait")
        self.post, self.take, self.close, self.wait = (
            partial(core[f"frd_tickets_{name}"], ctypes.c_void_p(handle)) for name in names
        )


class PlainTickets:
    """A pure Python implementation of `Tickets`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[bool] = SimpleQueue()
        self.wait = self._queue.get

    def post(self) -> None:
        """Add a ticket."""
        self._queue.put(True)

    def take(self) -> None:
        """Do nothing, because the queue's thread ignores the tickets of calls that have already run."""

    def close(self) -> None:
        """Stop the queue's thread after it has processed the remaining tickets."""
        self._queue.put(False)


class WorkQueue:
    """Runs the calls of one group in order, on its own thread or on a waiting thread.

    Args:
        name: The name of the group, also used in the name of the thread.
        whereabouts: A function that describes the current call and the ranks that the call is waiting for.
    """

    def __init__(self, name: str, whereabouts: Callable[[], str]) -> None:
        self.whereabouts = whereabouts
        self._name = name
        self.waiting: deque[QueuedWork] = deque()
        self._unseen_error: str | None = None
        self._running = _thread.allocate_lock()
        self.closed = False
        self.invalid = ""  # the reason why the queue is unusable, in a forked child
        self.holder: int | None = None  # the thread that runs a call, except the queue's own thread
        self._caller: int | None = None  # the thread that runs callbacks
        self._tickets: Tickets | PlainTickets | None = None  # created with `_thread`
        self.acquire: Callable[[bool], bool] = self._running.acquire
        self.release = self._running.release
        self._thread: threading.Thread | None = None

    def run(self, call: Call, tensors: Sequence[torch.Tensor]) -> dist.Work:
        """Run `call` after all earlier calls of the group, and block until `call` is complete."""
        if not self.enter():
            self.refuse_in_handler()
            self.submit(call, tensors).wait()
            return COMPLETED
        try:
            call(flags_here())
        finally:
            self.leave()
        return COMPLETED

    def enter(self) -> bool:
        """Acquire the queue if no call is running or queued, and return whether the queue was acquired.

        If the result is True, call `leave` to release the queue.
        """
        if self.waiting or not self.acquire(False):
            return False
        self.holder = _thread.get_ident()
        return True

    def leave(self) -> None:
        """Release the queue after `enter`."""
        self.holder = None
        self.release()

    def in_callback(self) -> bool:
        """Return whether this thread is running a callback for this queue."""
        return self._caller == _thread.get_ident()

    def submit(self, call: Call, tensors: Sequence[torch.Tensor]) -> QueuedWork:
        """Add `call` to the queue, and return its work object.

        If this thread is running a callback for this queue, run `call` immediately instead.
        """
        if self.closed:
            raise CommunicationError(
                self.invalid or f"the group was destroyed; create a new group{see('the-group-was-destroyed')}"
            )
        if self._unseen_error is not None:
            words, self._unseen_error = self._unseen_error, None
            self.acquire = self._running.acquire
            raise CommunicationError(words)
        work = QueuedWork(self, call, tensors)
        if self.in_callback():
            work.run(flags_here())
            return work
        self.waiting.append(work)
        if self._tickets is None:
            self._tickets = Tickets() if native.available() else PlainTickets()
            name = f"farandole-{self._name}"
            self._thread = threading.Thread(target=self._main, args=(self._tickets,), name=name, daemon=True)
            self._thread.start()
        self._tickets.post()
        return work

    def raise_at_next_call(self, words: str) -> None:
        """Make the next call raise `CommunicationError` with the message `words`."""
        self._unseen_error = words
        self.acquire = lambda blocking: False

    def refuse_in_handler(self) -> None:
        """Raise `CommunicationError` if the caller is a signal handler that interrupted a call in this queue."""
        if self.holder == _thread.get_ident() and not self.in_callback():
            raise CommunicationError(
                f"a signal handler used a group during a call on this group ({self.whereabouts()}), and would deadlock; "
                f"set a flag in the handler and make the call later, or use another group"
                f"{see('a-signal-handler-used-a-group')}"
            )

    def help(self) -> bool:
        """Run the next queued call on this thread unless another thread is running a call; return whether a call ran."""
        if self.in_callback():
            return self._run_next(flags_here())
        if not self._running.acquire(False):
            return False
        self.holder = _thread.get_ident()
        try:
            return self._run_next(flags_here())
        finally:
            self.leave()

    def run_callbacks(self, outcome: OutcomeFuture) -> None:
        """Complete `outcome` and run its callbacks.  The calling thread must have acquired the queue.

        Calls issued by the callbacks run immediately, before queued calls.
        """
        outer, self._caller = self._caller, _thread.get_ident()
        try:
            outcome.complete()
        finally:
            self._caller = outer

    def close(self, patience_s: float) -> bool:
        """Run the queued calls and end the thread; return False on timeout.

        The timeout is `patience_s` seconds.  A closed queue stays acquired, so no thread can run later calls.
        """
        if self.closed:
            return True
        if self._tickets is not None and self._thread is not None and not self.in_callback():
            self._tickets.close()
            self._thread.join(patience_s)
            if self._thread.is_alive():
                return False
        self.closed = self._running.acquire(timeout=patience_s)
        return self.closed

    def invalidate(self, reason: str) -> None:
        """Discard the queued calls, and make later calls fail with the message `reason`.

        Call this method in a forked child.
        """
        self.closed, self.invalid = True, reason
        # the lock may be held by a thread of the parent, which does not exist in this process
        self._running.acquire(False)
        self.waiting.clear()
        self._tickets = self._thread = None

    def _run_next(self, flags: int) -> bool:
        try:
            work = self.waiting.popleft()
        except IndexError:
            return False
        if self._tickets is not None:
            self._tickets.take()
        work.run(flags)
        error = work._error  # unlike `exception()`, does not mark the error as reported
        del work  # an error's traceback must not keep the work alive: see `QueuedWork.run`
        if error is not None and not isinstance(error, Exception):
            raise error  # raise Ctrl-C in this thread, even if another thread issued the work
        return True

    def _main(self, tickets: Tickets | PlainTickets) -> None:
        # torch applies `set_num_threads` at a thread's first `get_num_threads`, which matrix products do not call
        torch.get_num_threads()
        while tickets.wait():
            with self._running:
                self._run_next(BACKGROUND)


COMPLETED = CompletedWork([])
