"""The torch versions with which this package is tested."""

from __future__ import annotations

import logging
import re

OLDEST, NEWEST = (2, 11), (2, 15)

_log = logging.getLogger("farandole")
_reported = False


def tested() -> str:
    """Return the phrase "tested with torch ... to ..." with the oldest and the newest tested version."""
    return f"tested with torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def report_untested(global_rank: int) -> None:
    """Log a warning if this version of torch is untested.

    Only the first call on rank 0 checks the version.
    """
    global _reported
    if global_rank != 0 or _reported:
        return
    _reported = True
    import torch

    version = str(torch.__version__)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        _log.warning(
            "farandole: torch %s is untested; this release is %s; if a call fails, install one of these versions",
            version,
            tested(),
        )
