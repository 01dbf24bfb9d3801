"""Read the vendor, the family and the instruction sets of this machine's processor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """A processor as described by /proc/cpuinfo; without this file, all fields have their default values.

    Args:
        vendor: the vendor, such as "AuthenticAMD"; "" on Arm.
        family: the family number; 0 on Arm.
        flags: the instruction sets, such as "avx512f".
    """

    vendor: str = ""
    family: int = 0
    flags: frozenset[str] = frozenset()


def read_processor() -> Processor:
    """Return the first processor in /proc/cpuinfo."""
    try:
        text = _CPUINFO.read_text()
    except OSError:  # not Linux
        return Processor()

    def field(pattern: str) -> str:
        found = re.search(rf"^(?:{pattern})\s*:(.*)$", text, re.MULTILINE)
        return found[1].strip() if found else ""

    return Processor(
        field("vendor_id"), int(field("cpu family") or 0), frozenset(field("flags|Features").split())
    )
