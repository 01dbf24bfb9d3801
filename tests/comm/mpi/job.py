"""Jobs that mpiexec starts; each job runs many checks, because each rank takes seconds to import torch.

The helpers use the mpiexec next to the interpreter, or else the first one on PATH.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
OF_OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpi4py and mpiexec are required: pip install 'farandole[mpi]' mpich",
)


@functools.cache
def library() -> str:
    """Return the name of the MPI library that mpi4py loads."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def start(
    size: int, arguments: list[str], *, environ: dict[str, str] | None = None, options: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """Start a Python program on `size` ranks."""
    crowd = ["--oversubscribe"] if library() == "Open MPI" else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **OF_OPEN_MPI, **(environ or {})}
    return subprocess.Popen(
        [str(MPIEXEC), *crowd, "-n", str(size), *options, sys.executable, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(
    tmp_path: Path, size: int, text: str, *, environ: dict[str, str] | None = None, timeout_s: float = 30
) -> tuple[int, str, str]:
    """Run a script on `size` ranks; return its exit code, standard output and standard error."""
    script = tmp_path / "script.py"
    script.write_text(text)
    process = start(size, [str(script)], environ=environ)
    try:
        out, errors = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, out, errors


Check = tuple[str, str, list[Any]]
"""A module, a function, and the arguments of the function after rank and size."""


@functools.cache
def outcomes(size: int, checks: str) -> tuple[dict[str, str], str]:
    """Run checks; return the tracebacks by check number ("" for success), and the standard error of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        process = start(size, ["-m", "tests.comm.mpi.job", folder, checks])
        try:
            _, errors = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
            errors = "the job did not end within 240 s"
        found: dict[str, str] = {}
        for rank in range(size):
            path = Path(folder, f"{rank}.jsonl")
            for line in path.read_text().splitlines() if path.exists() else []:
                number, trace = json.loads(line)
                found[number] = found.get(number, "") + (f"rank {rank}:\n{trace}" if trace else "")
        return found, errors


def _be_a_rank(folder: str, checks: list[Check]) -> None:
    import time
    import traceback
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("farandole-mpi", timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    with open(Path(folder, f"{rank}.jsonl"), "w") as report:
        for number, (module, function, arguments) in enumerate(checks):
            started = time.monotonic()
            try:
                getattr(importlib.import_module(module), function)(rank, size, *arguments)
            except BaseException:
                print(json.dumps([str(number), traceback.format_exc()]), file=report, flush=True)
                raise
            print(json.dumps([str(number), ""]), file=report, flush=True)
            if rank == 0 and time.monotonic() > started + 2:
                print(f"{function}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    dist.destroy_process_group()
    _save_coverage()


def _save_coverage() -> None:
    """Save the coverage data, if coverage is measured: pending calls of a check end the job by MPI_Abort."""
    coverage = sys.modules.get("coverage")
    current = coverage and coverage.Coverage.current()
    if current:
        current.save()


if __name__ == "__main__":
    import importlib

    _be_a_rank(sys.argv[1], json.loads(sys.argv[2]))
