"""The seeds of random programs: a few in the test suite, and others with `make random`.

`FARANDOLE_SEEDS=7:200` selects 200 seeds, starting with seed 7.  The name of a failed test contains the seed.
"""

from __future__ import annotations

import os


def seeds(count: int) -> range:
    """Return the seeds that `FARANDOLE_SEEDS` selects, or the first `count` seeds if the variable is not set."""
    first, _, selected = os.environ.get("FARANDOLE_SEEDS", f"0:{count}").partition(":")
    return range(int(first), int(first) + int(selected or 1))
