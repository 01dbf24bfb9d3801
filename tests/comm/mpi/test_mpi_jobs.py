"""Whole programs over MPI: how they start, and how they end."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from farandole.comm.mpi.library import MpiUnavailable, check_world
from tests.comm.mpi.job import library, needs_mpi, run_script, start
from tests.launch.jobs import run

pytestmark = needs_mpi

NEVER_IMPORTS_US = """
import multiprocessing, os, sys
import torch, torch.distributed as dist
assert "farandole.comm" not in sys.modules and "mpi4py" not in sys.modules, "import torch must stay light"
for variable in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
    assert variable not in os.environ

def in_a_fork():
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 3)
    os._exit(4)

for backend in ("farandole-mpi", "cpu:farandole-mpi", "farandole-mpi"):
    dist.init_process_group(backend)
    assert dist.get_world_size() == 2, dist.get_world_size()
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    assert tensor == 3, tensor
    if backend == "farandole-mpi":
        assert dist.get_backend() == "farandole-mpi" == dist.group.WORLD.name()
        child = multiprocessing.get_context("fork").Process(target=in_a_fork)
        child.start()
        child.join(60)
        assert child.exitcode == 0, child.exitcode
        dist.barrier()
    dist.destroy_process_group()

from mpi4py import MPI
assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
import farandole
with farandole.init("farandole-mpi") as runtime:
    assert runtime.size == 2 and runtime.rank == MPI.COMM_WORLD.Get_rank() and "mpirun" in runtime.launcher
    tensor = runtime.comm.empty(3).fill_(1)
    runtime.comm.all_reduce(tensor)
    assert tensor.tolist() == [2, 2, 2]
print("done", flush=True)
"""

TORCHS_OWN_NAME = """
import sys
from mpi4py import MPI  # the program's own, at the level "multiple"
import torch, torch.distributed as dist
assert not dist.is_mpi_available()
import farandole.comm.mpi
farandole.comm.mpi.enable(timeout_s=20)
assert dist.is_mpi_available()
for turn in range(2):
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "mpi" and (rank, size) == (MPI.COMM_WORLD.Get_rank(), 2)
    tensor = torch.full((4,), float(rank), dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    assert (tensor == 1).all()
    alone, both = dist.new_group([1]), dist.new_group([1, 0])
    if rank == 1:
        dist.all_reduce(tensor, group=alone)
    dist.all_reduce(tensor, group=both)
    assert (tensor == 2).all() and dist.get_process_group_ranks(both) == [0, 1]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1]
    dist.barrier()
    dist.destroy_process_group()
MPI.COMM_WORLD.Barrier()
print("done", flush=True)
"""

ENDS = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("farandole-mpi")
rank = dist.get_rank()
os.write(1, f"pid {{rank}} {{os.getpid()}}\\n".encode())  # in one piece, as two ranks write
dist.all_reduce(torch.ones(1))
{body}
"""


def test_a_script_that_does_not_import_the_package(tmp_path):
    code, out, errors = run_script(tmp_path, 2, NEVER_IMPORTS_US)
    assert code == 0 and out.count("done") == 2, errors


def test_the_backend_name_mpi(tmp_path):
    code, out, errors = run_script(tmp_path, 2, TORCHS_OWN_NAME)
    assert code == 0 and out.count("done") == 2, errors


def test_one_process_without_mpiexec(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENDS.format(body="dist.barrier(); assert dist.get_world_size() == 1"))
    status, err = alone(str(script))
    assert status == 0, err


def test_a_wrong_launcher_is_named_with_the_remedy(tmp_path):
    """torchrun starts two processes, and MPI reports a job of one rank in each of them."""
    script = tmp_path / "script.py"
    script.write_text(ENDS.format(body=""))
    status, err = alone("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    assert status != 0
    assert re.search(
        r"torchrun .*started 2 ranks \(WORLD_SIZE=2\), but mpi4py has loaded \w+.*, which reports a single rank; "
        r"start the ranks with that library.s own mpiexec.*, or use the backend farandole with this launcher",
        err,
    ), err


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "WORLD_SIZE": "4"},
            r"Open MPI's mpirun started 4 ranks .*MPI4PY_MPIABI",
        ),
        ({"PMI_SIZE": "3"}, r"Hydra.* started 3 ranks \(PMI_SIZE=3\).*MPICH 5.*MPI4PY_LIBMPI"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 ranks.*srun --mpi=pmix"),
    ],
)
def test_launchers_that_contradict_mpi(environ, words):
    with pytest.raises(MpiUnavailable, match=words):
        check_world(environ, 1, "MPICH 5.0")
    check_world(environ, 4, "MPICH 5.0")
    check_world(dict.fromkeys(environ, "1"), 1, "MPICH 5.0")


PROBLEMS = """
import sys
case = sys.argv[1]
if case == "no mpi4py":
    sys.modules["mpi4py"] = None
if case == "one thread":
    import mpi4py
    mpi4py.rc.thread_level = "single"
    from mpi4py import MPI
import torch.distributed as dist
dist.init_process_group("farandole-mpi")
"""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no mpi4py", r"needs mpi4py 4 or later and an MPI library; run pip install 'farandole\[mpi\]'"),
        (
            "one thread",
            "the thread level 'serialized', got 'single' or 'funneled'.*mpi4py.rc.thread_level = 'serialized'",
        ),
    ],
)
def test_errors_name_missing_requirements(tmp_path, case, words):
    script = tmp_path / "script.py"
    script.write_text(PROBLEMS)
    status, err = alone(str(script), case)
    assert status == 1 and re.search(words, err), err


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_failed_rank_ends_the_job(tmp_path, how):
    body = "if rank == 1 and 'raises' == '{how}': raise KeyError('my fault')\ndist.all_reduce(torch.ones(3))"
    if how == "killed":
        body = "if rank == 1: time.sleep(60)\ndist.all_reduce(torch.ones(3))"
    script = tmp_path / "script.py"
    script.write_text(ENDS.format(body=body.format(how=how)))
    process = start(2, [str(script)])
    pids = {}
    while len(pids) < 2 and (line := process.stdout.readline()):
        pids.update({int(rank): int(pid) for rank, pid in re.findall(r"pid (\d) (\d+)", line)})
    assert len(pids) == 2
    if how == "killed":
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0 and time.monotonic() - began < 10
    assert how == "killed" or "KeyError: 'my fault'" in errors
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids.values()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_calls_are_compared_in_debug_mode_detail(tmp_path):
    body = """
try:
    dist.all_reduce(torch.ones(3 + rank)) if rank == 0 else dist.broadcast(torch.ones(7), 0)
except RuntimeError as error:
    print(type(error).__name__, error, flush=True)
"""
    code, out, errors = run_script(
        tmp_path, 2, ENDS.format(body=body), environ={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    )
    assert code == 0, errors
    assert out.count("CallMismatch") == 2
    assert re.search(
        r"rank 1 \(process \d+\) called broadcast\(7 x float32, from rank 0\), but rank 0", out
    ), out


def test_the_splits_of_all_to_all_are_compared_in_debug_mode_detail(tmp_path):
    body = """
for async_op in (False, True):
    group = dist.new_group([0, 1, 2])
    dist.all_to_all_single(torch.empty(3), torch.ones(3), group=group)
    parts = [3, 1, 1] if rank == 1 else [1, 1, 1]  # rank 0 sends 1 element to rank 1
    try:
        output, ones = torch.empty(sum(parts)), [1, 1, 1]
        work = dist.all_to_all_single(output, torch.ones(3), parts, ones, group=group, async_op=async_op)
        if async_op:
            work.wait()
    except RuntimeError as error:
        os.write(1, f"{type(error).__name__} {error}\\n".encode())
"""
    code, out, errors = run_script(
        tmp_path, 3, ENDS.format(body=body), environ={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    )
    assert code == 0, errors
    process = r"\(process \d+\)"
    found = re.findall(
        rf"CallMismatch rank 0 {process} sent 1 elements to rank 1 {process}, which expected 3, in "
        r"all_to_all\(float32\), call number 2 of group",
        out,
    )
    assert len(found) == 6, out


def alone(*arguments: str) -> tuple[int, str]:
    """Return the exit status and standard error of a Python program that is started without mpiexec."""
    status, _, err = run([sys.executable, *arguments], OMP_NUM_THREADS="1")
    return status, err


def test_the_library_is_known():
    assert library() in ("MPICH", "Open MPI", "Intel MPI", "MVAPICH")


BLOCKED = """
import os, signal, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from farandole.comm.mpi import group
from farandole.comm.mpi.engine import engine
dist.init_process_group("farandole-mpi", init_method="mpi://", timeout=timedelta(seconds=3))
engine().prefers_blocking = True  # as with Open MPI
large = torch.ones(1 << 20)
dist.all_reduce(large)
print(int(large[0]), flush=True)
if dist.get_rank() == 1:
    group.MpiGroup.block = lambda self, *call: os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(large)
"""


@needs_mpi
def test_a_call_that_blocks_inside_mpi_ends_at_its_deadline(tmp_path):
    start = time.monotonic()
    code, out, errors = run_script(tmp_path, 2, BLOCKED, timeout_s=60)
    assert code != 0 and "".join(out.split()) == "22"
    assert re.search(
        r"farandole: .* within the timeout of 3 s.*all_reduce\(sum, 1048576 x float32\).*; the MPI call cannot be interrupted, "
        r"so this process exits",
        errors,
    ), errors
    assert time.monotonic() - start < 40


STALLED = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("farandole-mpi", init_method="mpi://", timeout=timedelta(seconds=30))
rank = dist.get_rank()
if rank == 2:
    time.sleep(6)
dist.all_reduce(torch.ones(5))
print("first", file=sys.stderr, flush=True)
if rank == 0:
    time.sleep(6)
    dist.send(torch.ones(3), 1)
if rank == 1:
    dist.recv(torch.ones(3), 0)
dist.barrier()
dist.group.WORLD.set_timeout(timedelta(seconds=6))
try:
    dist.send(torch.ones(1_000_000), (rank + 1) % 3)
except RuntimeError as error:
    print(error, flush=True)
time.sleep(2)  # mpirun ends the other ranks when one has ended
"""


@needs_mpi
def test_a_waiting_rank_names_the_late_ranks(tmp_path):
    _, out, errors = run_script(tmp_path, 3, STALLED, timeout_s=90)
    first, *meanwhile, last = [line for line in errors.splitlines() if " has waited " in line]
    process = r"\(process \d+\)"
    absent = rf"rank {{}} {process} has not recorded its arrival"
    link = r"; the wait fails after \d+ s; see 'farandole explain has-waited'"
    assert re.fullmatch(
        rf"farandole: rank 0 {process} has waited \d s in all_reduce\(sum, 5 x float32\), call number 1 of the default group; "
        + absent.format(2)
        + link,
        first,
    )
    of_barrier, of_message = sorted(meanwhile, key=lambda line: "recv" in line)
    assert re.search(absent.format(0), of_barrier) and re.search(absent.format(1), of_barrier)
    assert re.fullmatch(
        rf"farandole: rank 1 {process} has waited \d s in recv\(3 x float32, from rank 0\); the message from rank 0 {process} has not "
        rf"arrived{link}",
        of_message,
    )
    calls = [rf"in send\(1000000 x float32, to rank {(rank + 1) % 3}\)" for rank in range(3)]
    cycle = rf"rank 0 {process} has waited \d s {calls[0]}" + "".join(
        rf"; rank {rank} {process} is waiting {calls[rank]}" for rank in (1, 2)
    )
    assert re.fullmatch(
        rf"farandole: {cycle}: these ranks are waiting for each other; post one of the receives first, .*; the wait fails after 6 s; .*",
        last,
    )
    for rank in range(3):
        assert re.search(
            rf"rank {(rank + 1) % 3} {process} did not receive the message that rank {rank} {process} sent in "
            rf"send\(1000000 x float32, to rank {(rank + 1) % 3}\) of the default group within the timeout of 6 s; its current call is unknown to this host",
            out,
        ), out


ABANDONED = """
import time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("farandole-mpi", init_method="mpi://", timeout=timedelta(seconds=20))
rank, group = dist.get_rank(), dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
if rank == 1:
    time.sleep(1)
try:
    dist.broadcast(torch.ones(4 + 4 * rank), 1, group=group)
except RuntimeError as error:
    print(f"rank {rank}: {type(error).__name__}", flush=True)
large = torch.full((1 << 20,), float(rank))
if rank == 0:
    time.sleep(1)  # meanwhile, the broadcast of rank 1 arrives
    work = dist.irecv(large, 1)
    time.sleep(4)
    print(f"received {large.mean().item()}", flush=True)
    work.wait()
else:
    start = time.monotonic()
    dist.send(large, 0)
    print(f"sent in time: {time.monotonic() - start < 3}", flush=True)
"""


def test_messages_progress_after_an_abandoned_call_has_failed(tmp_path):
    """Rank 0 stops waiting for a broadcast, which then fails because rank 1 passes another size."""
    code, out, errors = run_script(tmp_path, 2, ABANDONED)
    assert code == 0 and "Exception in thread" not in errors, errors
    assert "rank 0: RankLate" in out and "received 1.0" in out and "sent in time: True" in out, out


def test_messages_that_were_never_received_are_reported_when_the_group_is_destroyed(tmp_path):
    body = """
if rank == 0:
    dist.isend(torch.ones(4), 1, tag=3).wait()
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("farandole-mpi")
dist.barrier()
dist.destroy_process_group()
print("done", flush=True)
"""
    code, out, errors = run_script(tmp_path, 2, ENDS.format(body=body))
    assert code == 0 and out.count("done") == 2, errors
    process = r"\(process \d+\)"
    (warning,) = [line for line in errors.splitlines() if line.startswith("farandole: ")]
    assert re.fullmatch(
        rf"farandole: messages to rank 1 {process} of the default group were never received; the first is from rank 0 "
        rf"{process} with tag 3",
        warning,
    ), warning
