"""The backend in a script that never imports the package, under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.launch.jobs import run

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
    # with the arena of another process a descriptor of that process is kept
    return maps, memory, len(os.listdir("/proc/self/fd")) - maps, len(os.listdir("/proc/self/task"))

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
# a process keeps its own arena to its end, and the other one's until it next opens or closes a group
assert all(maps <= 2 and memory == 1 for maps, memory, _, _ in history), history
for what in (2, 3):
    assert history[-1][what] <= max(each[what] for each in history[:4]), history
report["destroyed"] = not dist.is_initialized()
open(f"{sys.argv[1]}-{rank}.json", "w").write(json.dumps(report))
"""


def test_a_script_that_does_not_import_the_package(tmp_path):
    """The script creates eleven worlds in sequence on torchrun's single store, and none leaves resources behind."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    status, _, err = run([*command, str(script), str(tmp_path / "report")], OMP_NUM_THREADS="1")
    assert status == 0, err
    for rank in (0, 1):
        report = json.loads((tmp_path / f"report-{rank}.json").read_text())
        for backend in ("farandole", "cpu:farandole", "cpu:farandole,cuda:nccl"):
            assert report[backend][0] == "FarandoleProcessGroup"
        assert report["farandole"][1] == "farandole"
        assert report["destroyed"]


FAIL = """
import json, os, sys, traceback
import torch.distributed as dist

said = {}
for case, backend, variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    try:
        dist.init_process_group(backend)
    except Exception as error:
        said[case] = "".join(traceback.format_exception(error))
    for name in variables:
        del os.environ[name]
print(json.dumps(said))
"""


def test_errors_in_a_process_without_a_rank(tmp_path):
    without = (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PMI_RANK",
        "PMIX_RANK",
        "OMPI_COMM_WORLD_RANK",
    )
    cases = [
        ("farandole under mpirun", "farandole", {"PMI_RANK": "1"}),
        ("farandole", "farandole", {}),
        ("gloo under mpirun", "gloo", {"PMI_RANK": "1"}),
        ("a backend that wheels lack", "mpi", {"RANK": "0", "WORLD_SIZE": "1"}),
    ]
    done = subprocess.run(
        [sys.executable, "-c", FAIL, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name not in without},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "RANK expected, but not set" in said["farandole under mpirun"]
    assert 'PMI_RANK is set): use farandole.init() or init_process_group("f' in said["farandole under mpirun"]
    assert "mpirun" not in said["farandole"] and "mpirun" not in said["gloo under mpirun"]
    absent = said["a backend that wheels lack"]
    assert "doesn't have MPI built in" in absent and "call farandole.comm.mpi.enable() before" in absent


GLOO_AT_EXIT = """
import torch
import torch.distributed as dist

dist.init_process_group("farandole")
gloo = dist.new_group(backend="gloo")
values = torch.ones(1 << 18)
for _ in range(20):
    dist.all_to_all_single(torch.empty_like(values), values, group=gloo)
dist.destroy_process_group()
"""


def test_a_thread_of_gloo_does_not_abort_the_exit(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GLOO_AT_EXIT)
    for _ in range(3):  # without a pause before the interpreter shuts down, most runs abort
        status, _, err = run([sys.executable, "-m", "farandole", "launch", "-n", "2", str(script)])
        assert status == 0, err
