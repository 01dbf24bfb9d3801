"""Run scripts that import `horovod` unmodified, under every installed launcher."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import ROOT, environment, ours, run, write

LAB = str(ROOT / "labs" / "horovod_digits.py")
BENCHMARK = str(ROOT / "labs" / "horovod_synthetic_benchmark.py")

SCRIPT = """
import os
import sys
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce
from horovod.torch.elastic import TorchState
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet
from horovod.common.util import env, is_version_greater_equal_than, num_rank_is_power_2, split_list
from horovod.torch.compression import Compressor, NoneCompressor
from horovod.torch.elastic.sampler import ElasticSampler
import helper
import farandole.horovod.torch
import torch

assert hvd is farandole.horovod.torch and hvd.__spec__.name == "farandole.horovod.torch"
assert hvd.elastic.TorchState is TorchState and hvd.ProcessSet is ProcessSet
assert hvd.elastic.ElasticSampler is ElasticSampler
assert hvd.HostsUpdatedInterrupt is HostsUpdatedInterrupt and hvd.HorovodInternalError is HorovodInternalError
assert hvd.Compression.none is NoneCompressor and issubclass(NoneCompressor, Compressor)
assert split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]] and split_list([1], 2) == [[1], []]
assert [num_rank_is_power_2(n) for n in range(5)] == [False, True, True, False, True]
assert is_version_greater_equal_than("2.13.0+cpu", "2.6.0") and not is_version_greater_equal_than("2.5", "2.6.0")
os.environ["SET"] = "before"
with env(SET="1", UNSET="2", IGNORED=None):
    assert (os.environ["SET"], os.environ["UNSET"], "IGNORED" in os.environ) == ("1", "2", False)
assert os.environ["SET"] == "before" and "UNSET" not in os.environ
assert __name__ == "__main__" and sys.argv[1:] == ["--flag", "value"], sys.argv
try:
    import horovod.mxnet
except ImportError as error:
    assert "does not provide horovod.mxnet" in str(error) and "horovod.torch" in str(error), error
else:
    raise AssertionError
hvd.init()
total = int(allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum))
sys.stdout.write(f"{hvd.rank()}|{hvd.size()}|{hvd.local_rank()}|{total}\\n")
sys.stdout.flush()
hvd.shutdown()
"""

SHIM = ["-m", "farandole.horovod.shim"]


def mpirun() -> str:
    found = Path(sys.executable).parent / "mpirun"
    command = str(found) if found.exists() else shutil.which("mpirun")
    if not command:
        pytest.skip("no mpirun here")
    return command


def commands(ranks: int) -> dict[str, list[str]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return {"farandole launch": ours("-n", str(ranks), *SHIM), "torchrun": [*torchrun, *SHIM]}


def script(folder: Path) -> list[str]:
    write(folder, "", "helper.py")
    return [write(folder, SCRIPT), "--flag", "value"]


def test_a_script_that_imports_horovod(tmp_path):
    status, out, err = run([sys.executable, *SHIM, *script(tmp_path)])
    assert status == 0, err
    assert out == "0|1|0|1\n"


def test_a_module_and_wrong_usage(tmp_path):
    write(tmp_path, "import horovod.torch as hvd; hvd.init(); print(hvd.size())", "program.py")
    shim = [sys.executable, *SHIM]
    done = subprocess.run(
        [*shim, "-m", "program"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "1\n", done.stderr
    for wrong in ([], ["-m"], ["--help"]):
        status, _, err = run([*shim, *wrong])
        assert status == 1 and err.startswith("usage: ")


def test_farandole_horovodrun_runs_scripts_that_import_horovod(tmp_path):
    write(tmp_path, "import horovod\nimport farandole.horovod\nassert horovod is farandole.horovod\n")
    script = "from farandole.cli.main import horovodrun; horovodrun()"
    for program in (["python", "program.py"], ["python", "-m", "program"]):
        command = ["env", sys.executable, "-c", script, "-np", "2", *program]
        status, _, err = run(command, tmp_path)
        assert status == 0, err


SPAWNING = """
import multiprocessing
import os
import sys

import horovod
import horovod.torch as hvd
from horovod.common.util import split_list


def work():
    import farandole.horovod.torch

    assert horovod is farandole.horovod and hvd is farandole.horovod.torch
    assert split_list([1, 2], 2) == [[1], [2]]


if __name__ == "__main__":
    assert __file__ == os.path.abspath("program.py") and sys.argv == ["program.py"]
    for method in ("spawn", "forkserver"):
        worker = multiprocessing.get_context(method).Process(target=work)
        worker.start()
        worker.join()
        assert worker.exitcode == 0, method
"""


def test_spawned_processes_can_import_horovod(tmp_path):
    write(tmp_path, SPAWNING)
    status, _, err = run(["env", sys.executable, *SHIM, "program.py"], tmp_path)
    assert status == 0, err


ALL = """
import runpy, sys
for script in sys.argv[1].split("|"):
    sys.argv = script.split()
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("farandole launch", "--use-adasum"),
        ("torchrun", "--gradient-predivide-factor 2"),
        ("mpirun", "--fp16-allreduce"),
    ],
)
def test_the_labs(tmp_path, launcher, options):
    """Run a script and the labs in one job.  The digits lab must learn, and the benchmark must print its results."""
    pytest.importorskip("sklearn", reason="labs/horovod_digits.py needs scikit-learn: pip install '.[labs]'")
    command = [mpirun(), "-n", "2", sys.executable, *SHIM] if launcher == "mpirun" else commands(2)[launcher]
    sizes = "--model tiny --image-size 32 --batch-size 4"
    turns = "--num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3"
    scripts = f"{' '.join(script(tmp_path))}|{LAB} --epochs 2 {options}|{BENCHMARK} {sizes} {turns}"
    forks = launcher != "mpirun"
    status, out, err = run([*command, write(tmp_path, ALL, "all.py"), scripts], fork_ranks=forks)
    assert status == 0, err
    lines = out.splitlines()
    assert sorted(lines[:2]) == ["0|2|0|3", "1|2|1|3"]
    digits, benchmark = lines[2:4], lines[4:]
    accuracy = float(re.findall(r"test accuracy (\S+),", digits[-1])[-1])
    assert accuracy > 0.85, out
    assert [line.split(":")[0] for line in benchmark] == [
        "Model",
        "Batch size",
        "Number of ranks",
        "Running warmup...",
        "Running benchmark...",
        *(f"Iter #{number}" for number in range(3)),
        "Img/sec per rank",
        "Total img/sec on 2 rank(s)",
    ], out
