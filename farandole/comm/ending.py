"""Leave the groups of a process at the end of its program, if it has not destroyed them.

The other ranks are told, so that a rank that ends early is named at once, with the exception that ended it if that is
known.  Then the threads of the groups are stopped: a thread in torch's C++ code when the interpreter shuts down would
abort the process.
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
"""For so long the interpreter lock is free before the interpreter shuts down.

A thread of Gloo frees the tensors of a completed operation after it has reported the completion, and needs the lock for it.
If it gets the lock during the shutdown, the process aborts ("terminate called without an active exception").
"""


CAUSE_S = 10.0
"""A program that ends within so many seconds after a failure ends because of the failure."""
_BECAUSE = ", because "
_failure: tuple[float, str] | None = None  # when, and the first cause


class Abandonable(Protocol):
    """A group that can be left in a hurry."""

    def abandon(self, note: str, patience_s: float) -> None:
        """Tell the others, and have this process's calls return."""


_open: weakref.WeakSet[Any] = weakref.WeakSet()
_prepared: int | None = None  # the process in which the end is prepared; a fork begins again


def remember_failure(error: BaseException, note: str) -> None:
    """Note why a group of this process broke; `note` is how the culprit explained its end, if it did."""
    global _failure
    cause = note.partition(_BECAUSE)[2] or str(error).partition(" after ")[0].partition(";")[0]
    _failure = time.monotonic(), cause


def with_cause(note: str) -> str:
    """Return a note on the end of this rank, with the failure that caused it.

    A rank that waits for this one then reads which rank failed first.
    """
    recent = _failure is not None and time.monotonic() < _failure[0] + CAUSE_S
    return f"{note}{_BECAUSE}{_failure[1]}" if recent and _failure is not None else note


def leave_at_end(group: Abandonable) -> None:
    """Have `group.abandon` called when the program ends."""
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
        text = ""  # a note is short, and the cause says the same
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
