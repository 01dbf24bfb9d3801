"""Memory that training frees and wants again a moment later stays with the process.

glibc gives large blocks back to the kernel as soon as they are freed, and the kernel clears every page of
them when they are asked for again.  A training step frees and takes the same activations each time: a
tenth of a step on a CPU went into that.  The settings are those of `man mallopt`.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, for blocks of up to 32 MiB; without effect on other C libraries."""
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        set_option(_M_TRIM_THRESHOLD, _NEVER)
