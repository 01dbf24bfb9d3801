"""Launch a group of checks: `python -m benchmarks.gpu.job RANKS ARGUMENTS...` runs `benchmarks.gpu.rank`."""

from __future__ import annotations

import sys

from farandole.launch.local import launch

if __name__ == "__main__":
    sys.exit(launch("benchmarks.gpu.rank", sys.argv[2:], ranks=int(sys.argv[1]), module=True, pin=False))
