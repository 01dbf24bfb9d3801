"""Clean-up of groups that the program has not destroyed when it ends.

A process notifies the other ranks, so that their errors name the rank that ended early and, if known, its exception.
Then the process stops the threads of its groups: a thread in torch's C++ code during interpreter shutdown aborts the
process.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from multiprocessing.util import Finalize
from typing import Any, Protocol

from farandole.comm.errors import CommunicationError

REST_S = 1.0
LOCK_S = 0.01
"""Seconds for which this thread releases the interpreter lock before the interpreter shuts down.

A thread of Gloo frees the tensors of an operation after it has reported its completion, and needs the lock to do so.
If it gets the lock during the shutdown, the process aborts ("terminate called without an active exception").
"""


CAUSE_S = 10.0
"""Seconds after a failure within which the end of the program is attributed to the failure."""
_BECAUSE = ", because "
_failure: tuple[float, str] | None = None  # when, and the first cause


class Abandonable(Protocol):
    """A group that can be left at program exit."""

    def abandon(self, note: str, patience_s: float) -> None:
        """Notify the other ranks and make the pending calls of this process fail."""


_open: weakref.WeakSet[Any] = weakref.WeakSet()
_prepared: int | None = None  # the process that has registered `_leave_all`; a forked child does so again


def remember_failure(error: BaseException, note: str) -> None:
    """Record why a group of this process failed; `note` is the explanation of the failed rank, if any."""
    global _failure
    cause = note.partition(_BECAUSE)[2] or str(error).partition(" after ")[0].partition(";")[0]
    _failure = time.monotonic(), cause


def with_cause(note: str) -> str:
    """Return a note on the end of this rank that includes the failure that caused it.

    The error of a rank that waits for this one then names the rank that failed first.
    """
    recent = _failure is not None and time.monotonic() < _failure[0] + CAUSE_S
    return f"{note}{_BECAUSE}{_failure[1]}" if recent and _failure is not None else note


def leave_at_end(group: Abandonable) -> None:
    """Register `group.abandon` to be called when the program ends."""
    global _prepared
    if _prepared != os.getpid():
        _prepared = os.getpid()
        _open.clear()
        # also at the end of a child of multiprocessing, which skips the functions of atexit
        Finalize(None, _leave_all, exitpriority=0)
    _open.add(group)


def _leave_all() -> None:
    error: Any = getattr(sys, "last_value", None)
    note = "its program ended" + (f" with {_in_words(error)}" if error is not None else "")
    deadline = time.monotonic() + REST_S
    for group in list(_open):
        group.abandon(note, max(0.0, deadline - time.monotonic()))
    time.sleep(LOCK_S)


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, CommunicationError) and with_cause(""):
        text = ""  # notes are short, and the cause contains the same text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
