"""Test that `farandole launch` accepts the command lines of torchrun and horovodrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.launch import limits
from farandole.launch.cores import usable_cores
from tests.launch.jobs import environment, ours, run, write

PROGRAM = """
import os, sys
names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "HOROVOD_CACHE_CAPACITY", "HOROVOD_STALL_CHECK_DISABLE")
sys.stdout.write("|".join([*(os.environ.get(name, "") for name in names), *sys.argv[1:]]) + "\\n")
if "fail" in sys.argv[1:] and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == sys.argv[2]:
    raise ValueError("the injected failure")
"""


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "2", "python", "PROGRAM", "a"],
        ["--nproc_per_node=2", "--standalone", "PROGRAM", "a"],
        ["--nproc-per-node", "2", "--nnodes", "1:1", "--rdzv-backend=c10d", "python3", "-u", "PROGRAM", "a"],
        ["-n", "2", "python", "-m", "program", "a"],
        ["-n", "2", "--no-python", sys.executable, "PROGRAM", "a"],
    ],
    ids=["horovodrun", "torchrun", "torchrun-c10d", "module", "no-python"],
)
def test_command_lines_of_other_launchers(tmp_path: Path, words: list[str]) -> None:
    program = write(tmp_path, PROGRAM)
    command = ours(*(program if word == "PROGRAM" else word for word in words))
    status, out, err = run(command, tmp_path, PYTHONPATH=f"{environment()['PYTHONPATH']}:{tmp_path}")
    assert status == 0, err
    assert sorted(out.splitlines()) == ["0|2|0|||a", "1|2|0|||a"]


def test_options_of_horovodrun_set_its_variables(tmp_path: Path) -> None:
    words = ["-np", "1", "--cache-capacity", "7", "--no-stall-check", "python", write(tmp_path, PROGRAM)]
    script = f"import sys; sys.argv[1:] = {words!r}; from farandole.cli.main import horovodrun; horovodrun()"
    job = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert (job.returncode, job.stdout) == (0, "0|1|0|7|1\n"), job.stderr


def test_failed_ranks_are_restarted(tmp_path: Path) -> None:
    status, out, err = run(ours("-n", "2", "--max-restarts", "2", write(tmp_path, PROGRAM), "fail", "0"))
    assert status == 0, err
    assert "1|2|1|||fail|0" in out.splitlines()
    assert "ValueError: the injected failure" in err
    assert err.count("restart 1 of 2: restarting all ranks") == 1
    assert "restart 2 of 2" not in err


def test_a_failure_after_the_last_restart_ends_the_job(tmp_path: Path) -> None:
    program = write(tmp_path, "import sys\nsys.exit(7)\n")
    status, _, err = run(ours("-n", "2", "--max-restarts", "1", program))
    assert status == 7
    assert err.count("restarting all ranks") == 1


def test_an_interrupted_job_is_not_restarted(tmp_path: Path) -> None:
    text = "import os, signal, sys, time\nif os.environ['RANK'] == '0':\n    os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)\n"
    status, _, err = run(ours("-n", "2", "--max-restarts", "3", write(tmp_path, text)))
    assert status == 130
    assert "restarting all ranks" not in err


def test_restarts_are_refused_on_several_hosts(tmp_path: Path) -> None:
    words = ["--nnodes", "2", "--rendezvous", "localhost:29511", "--max-restarts", "1"]
    status, _, err = run(ours(*words, write(tmp_path, PROGRAM)))
    assert status == 2
    assert "--max-restarts is supported on one host only" in err


def test_the_machine_determines_the_default_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in ([], ["--nproc-per-node", "auto"]):
        status, out, err = run(ours(*words, write(tmp_path, PROGRAM)))
        assert status == 0, err
        assert len(out.splitlines()) == limits.offered_ranks()
    status, out, err = run(ours("--nproc-per-node", "cpu", write(tmp_path, PROGRAM)))
    assert (status, len(out.splitlines())) == (0, usable_cores()), err
    monkeypatch.setattr(limits, "offered_accelerators", lambda: 5)
    assert limits.offered_ranks() == 5
    assert limits.offered_ranks(accelerators=0) == usable_cores() <= (os.cpu_count() or 1)
