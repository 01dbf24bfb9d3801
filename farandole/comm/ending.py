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

REST_S = 1.0
LOCK_S = 0.01
"""For so long the interpreter lock is free before the interpreter shuts down.

A thread of Gloo frees the tensors of a completed operation after it has reported the completion, and needs the lock for it.
If it gets the lock during the shutdown, the process aborts ("terminate called without an active exception").
"""


class Abandonable(Protocol):
    """A group that can be left in a hurry."""

    def abandon(self, note: str, patience_s: float) -> None:
        """Tell the others, and have this process's calls return."""


_open: weakref.WeakSet[Any] = weakref.WeakSet()
_prepared: int | None = None  # the process in which the end is prepared; a fork begins again


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
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
