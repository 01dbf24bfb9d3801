"""The signals that stop a job.

A signal that was ignored when the launcher started stays ignored.  `nohup` ignores SIGHUP, and a shell without
job control ignores SIGINT and SIGQUIT for its background jobs.
"""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def signals_to_handle() -> tuple[signal.Signals, ...]:
    """Return `SIGNALS` without those that this process ignores."""
    return tuple(number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


def restore_ignored_signals() -> None:
    """Restore Python's default handlers for those of `SIGNALS` that this process ignores."""
    for number in set(SIGNALS).difference(signals_to_handle()):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
