"""Memory that is freed goes back to the kernel while activations are swapped.

glibc takes blocks from its heap once it has seen that they are freed and wanted again, and its aligned blocks
leave gaps there that the next ones of the same size do not fit into: without this, a process that swaps grows as much
as one that does not.  Blocks that are mapped one by one are given back when they are freed; the price is
that the kernel clears their pages anew each time.  The settings are those of `man mallopt`.
"""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD = -3
_SMALLEST = 128 << 10
_LARGEST = 32 << 20  # glibc takes no more


def map_blocks_from(threshold_bytes: int) -> None:
    """Have glibc map every block of that size (within its bounds) by itself; without effect on other C libraries."""
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, min(max(threshold_bytes, _SMALLEST), _LARGEST))


def map_large_blocks_only() -> None:
    """Where glibc's own adaptation ends up in a training: blocks of up to 32 MiB come from the heap."""
    map_blocks_from(_LARGEST)
