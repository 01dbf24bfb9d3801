"""Cleanup of groups that still exist when the program ends.

The process notifies the other ranks, whose errors then name the rank that ended early and, if known, its exception.
Then the process stops the threads of its groups, because a thread that runs torch's C++ code during interpreter
shutdown aborts the process.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from multiprocessing.util import Finalize
from typing import Any, Protocol

from farandole._exceptions import message_of
from farandole.comm.errors import CommunicationError

REST_S = 1.0
LOCK_S = 0.01
"""How long the process releases the interpreter lock before the interpreter shuts down, in seconds.

A Gloo thread needs the lock to free an operation's tensors after the operation has completed.  If the thread acquires
the lock during shutdown, the process aborts ("terminate called without an active exception").
"""


CAUSE_S = 10.0
"""A program that ends within this many seconds after a failure is assumed to end because of the failure."""
_BECAUSE = ", because "
_failure: tuple[float, str] | None = None  # time and first cause


class Abandonable(Protocol):
    """A group that the process can leave at program exit."""

    def abandon(self, note: str, patience_s: float) -> None:
        """Leave the group: notify the other ranks, and end the pending calls of this process.

        Args:
            note: The reason shown in the errors of the other ranks.
            patience_s: How long to wait for pending calls, in seconds.
        """


_open: weakref.WeakSet[Any] = weakref.WeakSet()
_prepared: int | None = None  # the process that registered `_leave_all`; a forked child registers it again


def remember_failure(error: BaseException, note: str) -> None:
    """Record why a group of this process failed; `note` is the explanation given by the failed rank, if any."""
    global _failure
    cause = note.partition(_BECAUSE)[2] or str(error).partition(" after ")[0].partition(";")[0]
    _failure = time.monotonic(), cause


def with_cause(note: str) -> str:
    """Return `note`, followed by the failure that `remember_failure` has recently recorded, if any.

    Ranks that are waiting for this rank then report the rank that failed first.
    """
    recent = _failure is not None and time.monotonic() < _failure[0] + CAUSE_S
    return f"{note}{_BECAUSE}{_failure[1]}" if recent and _failure is not None else note


def leave_at_end(group: Abandonable) -> None:
    """Register `group.abandon` to be called when the program ends."""
    global _prepared
    if _prepared != os.getpid():
        _prepared = os.getpid()
        _open.clear()
        # unlike atexit, `Finalize` also runs at the end of multiprocessing children
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
    text = " ".join(message_of(error).split())
    if isinstance(error, CommunicationError) and with_cause(""):
        text = ""  # notes are short, and the cause contains the same text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
