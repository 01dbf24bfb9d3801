"""Run scripts that do not import the package, with torchrun's environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port

PROGRAM = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("farandole", timeout=timedelta(seconds=30))
dist.all_reduce(torch.ones(3))
{body}
"""


def run_program(tmp_path: Path, size: int, body: str, options: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """Run a script that does not import the package; return the exit code and standard error of each rank."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(body=body))
    processes = start_program(tmp_path, size, [*options, str(script)])
    ends = []
    for process in processes:
        _, errors = process.communicate(timeout=60)
        ends.append((process.returncode, errors))
    return ends


def start_program(tmp_path: Path, size: int, arguments: list[str]) -> list[subprocess.Popen[str]]:
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
