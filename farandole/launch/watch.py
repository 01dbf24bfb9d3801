"""Watching the ranks of one host: who ended, who must be stopped, and by when.

The rules, which are all there is to stopping a job:

1. When a rank fails, the others get half a second to end by themselves (their collectives tell them),
   then SIGTERM, then, after a few seconds, SIGKILL.
2. A signal to the launcher (Ctrl-C, SIGTERM, SIGHUP) is passed on to every rank once; they get a minute
   to save and end.  The second signal kills them.
3. What a rank has started (data loaders, say) ends with it, unless the rank ended well.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from subprocess import Popen

from farandole.launch.reports import signal_name

SETTLE_S = 0.5
STOP_S = 5.0
SAVE_S = 60.0
PATIENCE_S = 1.0
"""Ranks that take longer than this to stop, in seconds, are worth a line."""


class Watch:
    """The processes of the ranks, by local rank, and what has been asked of them.

    `poll` is called again and again until it returns True: all have ended.  `interrupt` may be called
    from a signal handler.
    """

    def __init__(
        self,
        processes: Mapping[int, Popen[bytes]],
        error_files: Mapping[int, str],
        say: Callable[[str], None],
        save_s: float = SAVE_S,
    ) -> None:
        self._processes = processes
        self._error_files = error_files
        self._say = say
        self._save_s = save_s
        self._signals: list[int] = []
        self._passed_on = 0
        self._passed_on_at: float | None = None
        self._failed_at: float | None = None
        self._kill_at: float | None = None
        self.ended_at: dict[int, float] = {}
        """When each rank was seen to have ended, in seconds since the epoch."""
        self.stopped: set[int] = set()
        """The ranks that were asked to stop before they had ended."""
        self.killed: set[int] = set()
        """Those of them that did not, in time, or when a second signal came."""

    @property
    def interrupted(self) -> bool:
        """Whether the launcher got a signal."""
        return bool(self._signals)

    @property
    def interrupted_by(self) -> int:
        """The first signal that the launcher got; 0 if none."""
        return self._signals[0] if self._signals else 0

    def interrupt(self, number: int) -> None:
        """Take note of a signal to the launcher; the next `poll` acts on it."""
        self._signals.append(number)

    def fail(self) -> None:
        """Treat the job as failed for a reason outside this host; the next `poll` acts on it."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def poll(self) -> bool:
        """Look at every rank, do what is due, and tell whether all have ended."""
        running = self._look()
        if not running:
            return True
        self._pass_on_signals(running)
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._send(signal.SIGKILL, running)
            self.killed.update(running)
            self._kill_at = now + STOP_S
        elif self._failed_at is not None and self._kill_at is None and now >= self._failed_at + SETTLE_S:
            self._send(signal.SIGTERM, running)
            self._kill_at = now + STOP_S
        return False

    def _look(self) -> list[int]:
        """Record the ranks that ended or failed since the last look; return those still running."""
        running = []
        for rank, process in self._processes.items():
            status = self._poll(process)
            if status is None:
                running.append(rank)
            elif rank not in self.ended_at:
                self.ended_at[rank] = time.time()
            failed = status not in (None, 0) or os.path.exists(self._error_files[rank])
            if failed and not self.interrupted:
                self.fail()
        return running

    def _poll(self, process: Popen[bytes]) -> int | None:
        """A rank's exit status, or None while it runs; unless it ended well, what it has started ends too.

        As long as the rank is not reaped, its number names its process group and no other.
        """
        if process.returncode is None and sys.platform == "linux":
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_status != 0:
                os.killpg(process.pid, signal.SIGKILL)
        return process.poll()

    def _pass_on_signals(self, running: list[int]) -> None:
        now = time.monotonic()
        if len(self._signals) > self._passed_on:
            if self._passed_on == 0:
                self._send(signal.Signals(self._signals[0]), running)
                self._passed_on_at = now
            self._kill_at = now + self._save_s if len(self._signals) == 1 else now
            self._passed_on = len(self._signals)
        elif self._passed_on_at is not None and now >= self._passed_on_at + PATIENCE_S:
            self._passed_on_at = None
            self._say(
                f"{signal_name(self._signals[0])}: {len(running)} of {len(self._processes)} ranks are still "
                f"stopping; they have {self._save_s:g} s, and a second signal kills them"
            )

    def _send(self, number: signal.Signals, running: list[int]) -> None:
        """Signal each rank's process group: the rank and what it has started."""
        for rank in running:
            self.stopped.add(rank)
            os.killpg(self._processes[rank].pid, number)
