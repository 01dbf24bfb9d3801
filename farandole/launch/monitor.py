"""Monitor the ranks of one host, and stop them according to these rules:

1. When a rank fails, the collectives of the other ranks raise an error.  These ranks have half a second to end.  Then
   they get SIGTERM, and after a few seconds SIGKILL.
2. The first signal to the launcher (Ctrl-C, SIGTERM, SIGHUP, SIGQUIT) is forwarded to every rank once.  The ranks
   have `stop_timeout_s` seconds to save their state and exit, by default one minute.  A second signal kills the ranks.
3. When a rank fails, the processes that it has started (data loaders, for example) are killed.

A signal that was ignored when the launcher started stays ignored.  `nohup` ignores SIGHUP, and a shell without job
control ignores SIGINT and SIGQUIT for its background jobs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from subprocess import Popen

from farandole.launch.reports import describe_slow_stop, notify

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that stop a job."""

FAILURE_GRACE_S = 0.5
TERMINATION_GRACE_S = 5.0
STOP_TIMEOUT_S = 60.0
SLOW_STOP_S = 3.0
"""How long, in seconds, ranks may take to stop before the launcher reports that they are still running."""


def signals_to_handle() -> tuple[signal.Signals, ...]:
    """Return the signals in `SIGNALS` that this process does not ignore."""
    return tuple(number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


def restore_ignored_signals() -> None:
    """Restore Python's default handlers for the signals in `SIGNALS` that this process ignores."""
    for number in set(SIGNALS).difference(signals_to_handle()):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextlib.contextmanager
def restored_handlers() -> Iterator[None]:
    """Restore the handlers for the signals in `SIGNALS` when the context exits."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RankMonitor:
    """Monitors the ranks of one host, and sends signals according to the rules in this module's docstring.

    Ranks are identified by local rank.  `global_ranks` maps each local rank to its global rank, for messages.
    Call `poll` repeatedly until it returns True.  `interrupt` may be called from a signal handler.
    """

    def __init__(
        self,
        processes: Mapping[int, Popen[bytes]],
        error_files: Mapping[int, str],
        global_ranks: Mapping[int, int],
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self._processes = processes
        self._error_files = error_files
        self._global_ranks = global_ranks
        self._stop_timeout_s = stop_timeout_s
        self._signals: list[int] = []
        self._forwarded = 0
        self._report_at: float | None = None  # the time at which to report that ranks are slow to stop
        self._failed_at: float | None = None
        self._kill_at: float | None = None
        self.ended_at: dict[int, float] = {}
        """The time at which each rank was found to have ended, in seconds since the epoch."""
        self.stopped: set[int] = set()
        """The ranks that received a signal before they had ended."""
        self.killed: set[int] = set()
        """The stopped ranks that were killed, because they were too slow or because of a second signal."""

    @property
    def interrupted_by(self) -> int:
        """The number of the first signal that the launcher received, or 0."""
        return self._signals[0] if self._signals else 0

    def interrupt(self, number: int) -> None:
        """Record that the launcher has received signal `number`; the next `poll` handles the signal."""
        self._signals.append(number)

    def fail(self) -> None:
        """Record that the job has failed; later calls to `poll` stop the ranks."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def poll(self) -> bool:
        """Check every rank, send the signals that are due, and return whether all ranks have ended."""
        running = self._find_running()
        if not running:
            return True
        self._forward_signals(running)
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._send(signal.SIGKILL, running)
            self.killed.update(running)
            self._report_at = None
            self._kill_at = now + TERMINATION_GRACE_S
        elif (
            self._failed_at is not None and self._kill_at is None and now >= self._failed_at + FAILURE_GRACE_S
        ):
            self._send(signal.SIGTERM, running)
            self._kill_at = now + TERMINATION_GRACE_S
        return False

    def _find_running(self) -> list[int]:
        """Return the running ranks; record ranks that have ended or failed."""
        running = []
        for rank, process in self._processes.items():
            status = self._poll(process)
            if status is None:
                running.append(rank)
            elif rank not in self.ended_at:
                self.ended_at[rank] = time.time()
            failed = status not in (None, 0) or os.path.exists(self._error_files[rank])
            if failed and not self._signals:
                self.fail()
        return running

    def _poll(self, process: Popen[bytes]) -> int | None:
        """Return a rank's exit status, or None if the rank is running; if it failed, kill its child processes."""
        if process.returncode is None and sys.platform == "linux":
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_status != 0:
                # before the rank is reaped, because the kernel may then reuse the id of the process group
                os.killpg(process.pid, signal.SIGKILL)
        return process.poll()

    def _forward_signals(self, running: list[int]) -> None:
        now = time.monotonic()
        if len(self._signals) > self._forwarded:
            if self._forwarded == 0:
                self._send(signal.Signals(self._signals[0]), running)
                self._report_at = now + SLOW_STOP_S
            self._kill_at = now + self._stop_timeout_s if len(self._signals) == 1 else now
            self._forwarded = len(self._signals)
        elif self._report_at is not None and now >= self._report_at:
            self._report_at = None
            slow = [self._global_ranks[rank] for rank in running]
            notify(describe_slow_stop(slow, self._stop_timeout_s))

    def _send(self, number: signal.Signals, running: list[int]) -> None:
        """Send a signal to each running rank and the processes that it has started."""
        for rank in running:
            self.stopped.add(rank)
            os.killpg(self._processes[rank].pid, number)
