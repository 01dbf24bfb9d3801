"""Configure the interpreter and the C library so that processes start, run and exit faster.

Importing torch creates no garbage, but garbage collection takes about a tenth of the import time (measured: 13 %).  At
exit, destroying all modules takes even longer.
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
    """Disable garbage collection until `resume_collection` is called.

    If garbage collection is already disabled, neither this function nor `resume_collection` has an effect.
    """
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume_collection() -> None:
    """Enable garbage collection again if `pause_collection` disabled it.

    Existing objects are then excluded from collections.  Otherwise, a collection would traverse all objects of torch,
    which takes a tenth of a second while the other ranks wait.
    """
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Return a context manager that disables garbage collection, for faster imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 32 MiB; other C libraries are not affected.

    By default, glibc returns large freed blocks to the kernel, and the kernel clears their pages before each reuse.
    For the activations of a training step, this takes a tenth of the step time on a CPU.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        set_option(_M_TRIM_THRESHOLD, _NEVER)


def leave(status: int) -> NoReturn:
    """End this process like `sys.exit(status)`, but without destroying the modules.

    Before the process ends, this function joins the threads, calls the `atexit` functions and flushes stdout and
    stderr.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing calls this function too
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a stream is None if its descriptor was closed
        with contextlib.suppress(OSError, ValueError):  # the stream is closed, or its reader has ended
            stream.flush()
    os._exit(status)
