"""Configure the interpreter and the C library so that processes start, run and exit faster.

Torch consists of a thousand modules.  Importing them creates no garbage, but the collector traverses them repeatedly,
which takes about a tenth of the import time (measured: 13 %).  At exit, the interpreter destroys every module, which
takes longer than these traversals.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # `man mallopt`
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc's limit
_NEVER = 2**31 - 1

_paused = False


def pause_collection() -> None:
    """Disable garbage collection until `resume_collection`, if it is enabled."""
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume_collection() -> None:
    """Enable garbage collection after `pause_collection`, and exclude all existing objects from it.

    A collection that traverses all of torch takes a tenth of a second, during which the other ranks wait.
    """
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Return a context in which garbage collection is disabled, for imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 32 MiB; other C libraries are not affected.

    Glibc returns large blocks to the kernel, which clears every page of them when they are allocated again.  A training
    step frees and allocates the same activations each time; clearing their pages took a tenth of the step time on a
    CPU.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        set_option(_M_TRIM_THRESHOLD, _NEVER)


def leave(status: int) -> NoReturn:
    """End this process like `sys.exit`, but without destroying the modules.

    The function joins the threads, calls the `atexit` functions and flushes the standard streams.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing calls this function too
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the stream is closed, or its reader has ended
            stream.flush()
    os._exit(status)
