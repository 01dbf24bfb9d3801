"""More ranks than the pool has: forked processes on the core alone, without torch."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import array, os, sys
from pathlib import Path
from farandole import native
from tests.native.ranks import join

ranks, core = 20, native.library()
children = []
for rank in range(1, ranks):
    child = os.fork()
    if not child:
        break
    children.append(child)
else:
    rank = 0

group = join(rank, ranks, Path(sys.argv[1]))
INT32, SUM = 4 << 8 | 7, 0
wrong = 0
for turn in range(20):
    for count in (1, 100, 700):  # small, and over one window
        values = array.array("i", [rank * 1000 + i + turn for i in range(count * ranks)])
        mine = array.array("i", [0] * count)
        status = core.frd_reduce_scatter_even(
            group, values.buffer_info()[0], mine.buffer_info()[0], count, INT32, SUM, 0
        )
        base = sum(r * 1000 for r in range(ranks))
        expected = [base + ranks * (rank * count + i + turn) for i in range(count)]
        wrong += status != 0 or mine.tolist() != expected
if rank:
    os._exit(wrong > 0)
failed = [os.waitpid(child, 0)[1] for child in children]
sys.exit(f"{wrong} wrong on rank 0, {failed}" if wrong or any(failed) else 0)
"""


def test_reduce_scatter_on_twenty_ranks(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
