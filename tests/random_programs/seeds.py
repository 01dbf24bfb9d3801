"""The seeds of random programs: fixed ones in the test suite, and many others with `make fuzz`.

`FARANDOLE_SEEDS=7:200` selects the 200 seeds from 7.  Failures name their seed, so `FARANDOLE_SEEDS=SEED:1` repeats them.
"""

from __future__ import annotations

import os


def seeds(count: int) -> range:
    """Return the seeds that `FARANDOLE_SEEDS` selects, or the first `count` seeds."""
    first, _, selected = os.environ.get("FARANDOLE_SEEDS", f"0:{count}").partition(":")
    return range(int(first), int(first) + int(selected or 1))
