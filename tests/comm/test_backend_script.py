"""The backend in a script that never imports the package, under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import gc, json, os, sys
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
assert "farandole.comm" not in sys.modules, "import torch must stay light"

def counts():
    gc.collect()
    maps = sum("memfd:farandole" in line for line in open("/proc/self/maps"))
    memory = sum("memfd" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}"))
    return maps, memory, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

report = {}
history = []
for backend in ("farandole", "cpu:farandole", "cpu:farandole,cuda:nccl", *["farandole"] * 8):
    dist.init_process_group(backend)
    group = dist.group.WORLD
    report[backend] = [type(group).__name__, dist.get_backend(), dist.get_backend_config()]
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor == 3, tensor
    dist.all_reduce(tensor, async_op=True).wait()
    sub = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=sub)
    assert tensor == 12
    dist.barrier()
    dist.destroy_process_group()
    history.append(counts())
assert history[-1][0] == history[-1][1] == 0, history
assert history[-1][2] <= history[3][2] and history[-1][3] <= history[3][3], history
report["destroyed"] = not dist.is_initialized()
open(f"{sys.argv[1]}-{rank}.json", "w").write(json.dumps(report))
"""


def test_a_script_that_never_imports_us(tmp_path):
    """Eleven worlds one after another, at the one store that torchrun keeps, with nothing left of any."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = subprocess.run(
        [*command, str(script), str(tmp_path / "report")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    for rank in (0, 1):
        report = json.loads((tmp_path / f"report-{rank}.json").read_text())
        for backend in ("farandole", "cpu:farandole", "cpu:farandole,cuda:nccl"):
            assert report[backend][0] == "FarandoleProcessGroup"
        assert report["farandole"][1] == "farandole"
        assert report["destroyed"]


def failed(backend: str, **variables: str) -> str:
    """What a process says that makes a group where nothing tells its rank."""
    without = (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PMI_RANK",
        "PMIX_RANK",
        "OMPI_COMM_WORLD_RANK",
    )
    environ = {name: value for name, value in os.environ.items() if name not in without} | variables
    program = f"import torch.distributed as dist; dist.init_process_group({backend!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environ
    )
    assert done.returncode == 1
    return done.stderr


def test_what_to_do_under_mpirun_is_added_to_torchs_words():
    said = failed("farandole", PMI_RANK="1")
    assert "RANK expected, but not set" in said
    assert (
        'PMI_RANK is set): farandole.init() finds its place under them, and so does init_process_group("f'
        in said
    )
    assert "mpirun" not in failed("farandole") and "mpirun" not in failed("gloo", PMI_RANK="1")


def test_the_backend_that_wheels_lack():
    said = failed("mpi", RANK="0", WORLD_SIZE="1")
    assert "doesn't have MPI built in" in said and "call farandole.comm.mpi.enable() before" in said
