"""Configure the interpreter and the C library so that processes start, run and exit faster.

torch consists of a thousand modules.  Importing them creates no garbage, but the garbage collector traverses their
objects repeatedly, which takes about a tenth of the import time (measured: 13 %).  At exit, the interpreter destroys
every module, which takes longer than all these traversals.
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

    If garbage collection is already disabled, neither function has an effect.
    """
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume_collection() -> None:
    """Enable garbage collection again if `pause_collection` disabled it, and exclude all existing objects from it.

    Without this exclusion, a collection would traverse all objects of torch.  That takes a tenth of a second, during
    which the other ranks wait.
    """
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Return a context manager that disables garbage collection, which makes imports faster."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 32 MiB; other C libraries are not affected.

    By default, glibc returns large freed blocks to the kernel.  When the memory is allocated again, the kernel clears
    every page.  Each training step allocates and frees activations of the same sizes; clearing their pages took a
    tenth of the step time on a CPU.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        set_option(_M_TRIM_THRESHOLD, _NEVER)


def leave(status: int) -> NoReturn:
    """End this process with exit status `status`, like `sys.exit` but without destroying the modules.

    Before the process ends, this function joins the threads, calls the `atexit` functions and flushes stdout and
    stderr.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing calls this function too
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a stream is None if its descriptor was closed
        with contextlib.suppress(OSError, ValueError):  # the stream is closed, or its reader has ended
            stream.flush()
    os._exit(status)
