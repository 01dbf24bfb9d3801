"""Ctrl-C and SIGTERM: finish the step, save, then end.  A second Ctrl-C ends at once."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While in force, notes the first signal instead of ending the process.

        with StopSignals() as stop:
            while not stop.requested: ...

    A second SIGINT ends the process, but not within half a second of the first, nor does a second SIGTERM:
    launchers pass on to their ranks what the terminal has sent them already.

    A signal that was ignored before stays ignored, such as SIGINT in a background job of a shell.
    """

    ONE_PRESS_S = 0.5

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._first_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._first_at = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._first_at > self.ONE_PRESS_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
