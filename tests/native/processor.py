"""Determine the vector extensions of this processor from the kernel."""

from __future__ import annotations

import platform
from pathlib import Path

from farandole.native import VectorLevel


def vector_level() -> VectorLevel:
    """Return the vector level that the C core must choose on this processor."""
    if platform.machine() != "x86_64":
        return VectorLevel.PLAIN
    line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    flags = set(line.partition(":")[2].split())
    if not {"avx2", "f16c"} <= flags:
        return VectorLevel.PLAIN
    return (
        VectorLevel.AVX512 if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags else VectorLevel.AVX2
    )
