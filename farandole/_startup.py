"""Beginning and ending a process quickly: torch is a thousand modules, which are made once and live as long as it does.

While they are imported there is no garbage, but the collector looks at all of them again and again, which takes a fifth of
the time; and at the end the interpreter takes every one apart, which takes another fifth.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

_paused = False


def pause_collection() -> None:
    """Look for no garbage until `resume_collection`, unless that is switched off anyway."""
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume_collection() -> None:
    """Look for garbage again after `pause_collection`, but not among what there is by now: it stays.

    A collection that looks at all of torch takes a tenth of a second, in which the other ranks wait.
    """
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import, in this block, without looking for garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def leave(status: int) -> NoReturn:
    """End this process as `sys.exit` would, but for taking the interpreter apart.

    Threads are waited for, and what was registered with `atexit` is called; what is printed arrives.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its processes
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(status)
