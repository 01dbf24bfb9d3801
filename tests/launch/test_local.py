"""Test `farandole launch` with real processes: how jobs end, and that they leave no files or processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver

import pytest

from farandole.launch.monitor import SLOW_STOP_S
from farandole.launch.reports import signal_name
from tests.launch.jobs import all_ended, finish, ours, run, start, wait_for_lines, write
from tests.ports import free_port

HELLO = """
import os, sys
import farandole
with farandole.init() as runtime:
    import torch
    total = torch.ones(1) * (runtime.rank + 1)
    runtime.comm.all_reduce(total)
    print(runtime.rank, runtime.size, runtime.local_rank, runtime.local_size, runtime.launcher, int(total),
          torch.get_num_threads(), sorted(os.sched_getaffinity(0)), sys.argv[1:], sep="|")
"""

FAIL = """
import os, signal, sys
import farandole
runtime = farandole.init()
runtime.comm.barrier()
def divide(x):
    return x / 0
if runtime.rank == 1:
    if sys.argv[1] == "raise":
        divide(1)
    os.kill(os.getpid(), signal.SIGKILL)
runtime.comm.barrier()
"""

END = """
import os, signal, sys, time
if sys.argv[1] == "everywhere":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher would stop a rank that fails 0.5 s after the other
    open(sys.argv[2] + os.environ["RANK"], "w").close()
    while not all(os.path.exists(sys.argv[2] + rank) for rank in "01"):
        time.sleep(0.01)
    raise RuntimeError("the same on all ranks")
if os.environ["RANK"] == "1":
    sys.exit(7 if sys.argv[1] == "status" else "the input is empty")
time.sleep(60)
"""

WAIT = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
how = sys.argv[2]
def save(number, frame):
    with open(folder / "saved", "a") as file:
        file.write(f"{os.environ['RANK']} {signal.Signals(number).name}\\n")
    sys.exit(128 + number)
if how == "save":
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
if how == "ignore" or how == "slow" and os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if how == "hang" and os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(folder / "pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
if how == "hang" and os.environ["RANK"] == "1":
    raise ValueError("rank 0 will not listen")
time.sleep(100)
"""


LOADER = """
import subprocess
print(subprocess.Popen(["sleep", "100"]).pid)
raise ValueError("no more")
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Yield a folder for temporary files of the job, and check that it is empty at the end."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    forkserver.ensure_running()  # outside of the folder: torch creates a temporary folder when the server loads it
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def start_waiting(tmp_path):
    """Return a function that starts a job of two waiting ranks and returns the launcher and the ranks' process ids."""
    jobs = []
    folder = tmp_path / "tmp"
    folder.mkdir(exist_ok=True)  # a killed launcher leaves a folder

    def start_job(how, ignored=()):
        job = start(
            ours("-n", "2", write(tmp_path, WAIT), str(tmp_path), how), ignored=ignored, TMPDIR=str(folder)
        )
        jobs.append(job)
        return job, [int(line) for line in wait_for_lines(tmp_path / "pids", 2)]

    yield start_job
    for job in jobs:
        job.kill()  # its ranks end with it
        job.communicate()


def test_ranks_find_each_other_and_share_the_cores(tmp_path, temporary):
    status, out, err = run(ours("--ranks", "2", write(tmp_path, HELLO), "--lr", "$x ${local_rank} $$"))
    assert status == 0, err
    rows = sorted(line.split("|") for line in out.splitlines())
    assert [row[:6] for row in rows] == [
        [str(rank), "2", str(rank), "2", "farandole launch", "3"] for rank in range(2)
    ]
    assert {row[8] for row in rows} == {"['--lr', '$x ${local_rank} $$']"}
    assert err.count("\n") == 1
    assert err.startswith("2 ranks on ")
    if len(os.sched_getaffinity(0)) == 2 and ", pinned (" in err:
        assert [(row[6], row[7]) for row in rows] == [("1", "[0]"), ("1", "[1]")]


FLAGS = """
import os, sys
names = ("HOROVOD_TIMELINE", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "GLOO_SOCKET_IFNAME")
print(os.environ["WORLD_SIZE"], *(os.environ.get(name) for name in names))
print("a complaint", file=sys.stderr)
"""


def test_flags_of_horovodrun(tmp_path):
    flags = [
        "-np",
        "1",
        "--timeline-filename",
        "t.json",
        "--fusion-threshold-mb",
        "32",
        "--cycle-time-ms",
        "3.5",
    ]
    status, out, err = run(ours(*flags, "--network-interface", "lo", "--verbose", write(tmp_path, FLAGS)))
    assert status == 0, err
    assert out == "1 t.json 33554432 3.5 lo\n"
    assert "rank 0 of 1: process " in err


def test_the_output_of_every_rank_goes_to_its_own_files(tmp_path):
    logs = tmp_path / "logs"
    status, out, err = run(ours("-n", "2", "--output-filename", str(logs), write(tmp_path, FLAGS)))
    assert (status, out) == (0, "")
    assert "complaint" not in err
    for rank in range(2):
        assert (logs / f"rank.{rank}" / "stdout").read_text() == "2 None None None None\n"
        assert (logs / f"rank.{rank}" / "stderr").read_text() == "a complaint\n"


def test_arguments_after_the_script_are_passed_to_it(tmp_path):
    program = write(tmp_path, "import sys\nprint(sys.argv[1:])\n")
    status, out, err = run(ours(program, "--ranks", "3"))
    assert (status, out) == (0, "['--ranks', '3']\n" * 2)
    assert f"--ranks follows {program} and is passed to it" in err
    _, _, err = run(ours("-n", "1", program, "--ranks", "3"))
    assert "follows" not in err


@pytest.mark.parametrize("words", [["--output-filename", "logs", "program.py"], ["--no-python", "true"]])
def test_a_closed_output_is_ignored(tmp_path, words):
    write(tmp_path, "print('x')\n")
    status, _, err = run(["sh", "-c", 'exec "$@" >&-', "sh", *ours("-n", "1", *words)], tmp_path)
    assert status == 0, err
    assert "Error" not in err


def test_a_linked_script_imports_from_the_folder_of_its_target(tmp_path):
    (tmp_path / "target").mkdir()
    write(tmp_path / "target", "name = 'helper'\n", "helper.py")
    write(tmp_path / "target", "import helper, sys\nprint(helper.name, __file__, sys.argv)\n")
    (tmp_path / "link.py").symlink_to("target/program.py")
    for shim in ([], ["-m", "farandole.horovod.shim"]):
        status, out, err = run(ours("-n", "1", *shim, "link.py"), tmp_path)
        assert (status, out) == (0, f"helper {tmp_path}/link.py ['link.py']\n"), err


@pytest.mark.parametrize("name", ["hello_module", "namespace.inside.hello_module"])
def test_a_module_runs_under_every_rank(tmp_path, name):
    file = tmp_path / (name.replace(".", "/") + ".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(HELLO if name == "hello_module" else "import sys\nprint(sys.argv[1:])\n")
    status, out, err = run(ours("-n", "1", "-m", name, "--flag"), tmp_path)
    assert status == 0, err
    if name == "hello_module":
        assert out.startswith("0|1|0|1|farandole launch|1|")
    assert out.split("|")[-1] == "['--flag']\n"


def test_a_module_of_a_package_under_the_installed_command(tmp_path):
    """The launcher finds the module in the current folder, as python -m does, and imports nothing of it."""
    (tmp_path / "outer").mkdir()
    write(tmp_path / "outer", "import os\nprint(os.environ.get('RANK'))\n", "__init__.py")
    write(tmp_path / "outer", "print('run')\n", "inner.py")
    command = [sys.executable, "-P", "-c", "from farandole.cli.main import main; main()", "launch", "-n", "1"]
    status, out, err = run(["env", *command, "-m", "outer.inner"], tmp_path)
    assert (status, out) == (0, "0\nrun\n"), err


def test_an_exception_is_shown_once_with_its_rank(tmp_path, temporary):
    status, _, err = run(ours("-n", "2", write(tmp_path, FAIL), "raise"), fork_ranks=True)
    assert status == 1
    assert err.count("Traceback") == 1
    assert "rank 1 (pid " in err and "ZeroDivisionError: division by zero" in err
    assert "in divide" in err
    assert not any(noise in err for noise in ("runpy", "elastic", "child.py", "local.py"))
    assert err.splitlines()[-1].startswith("Rank 0 ")


def test_a_killed_rank_ends_the_job_with_a_hint(tmp_path, temporary):
    started = time.monotonic()
    status, _, err = run(ours("-n", "2", write(tmp_path, FAIL), "kill"), fork_ranks=True)
    assert status == 128 + signal.SIGKILL
    assert "rank 1 (pid " in err and "was killed by SIGKILL" in err and "memory" in err
    assert "Traceback" not in err
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [("status", 7, "ended with exit status 7"), ("message", 1, "the input is empty")],
)
def test_exit_statuses_and_messages(tmp_path, how, status, message):
    found, _, err = run(ours("-n", "2", write(tmp_path, END), how))
    assert found == status
    assert err.count(message) == 1
    assert "Traceback" not in err


def test_the_same_error_on_every_rank_is_shown_once(tmp_path):
    status, _, err = run(ours("-n", "2", write(tmp_path, END), "everywhere", str(tmp_path / "started-")))
    assert status == 1
    assert err.count("RuntimeError: the same on all ranks") == 1
    assert "The same happened on rank " in err


def test_a_rank_that_ignores_sigterm_is_killed_after_a_failure(temporary, start_waiting):
    job, pids = start_waiting("hang")
    started = time.monotonic()
    status, _, err = finish(job)
    assert status == 1
    assert "ValueError: rank 0 will not listen" in err
    assert err.splitlines()[-1] == "Rank 0 was stopped."
    assert time.monotonic() - started < 15
    assert all_ended(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_every_rank_save(tmp_path, temporary, start_waiting, number):
    job, pids = start_waiting("save")
    job.send_signal(number)
    status, _, err = finish(job)
    assert status == 128 + number
    assert sorted((tmp_path / "saved").read_text().splitlines()) == [f"{r} {number.name}" for r in range(2)]
    assert err.splitlines()[1:] == [f"stopped by {signal_name(number)}"]
    assert all_ended(pids)


def test_signals_ignored_at_the_start_stay_ignored(tmp_path, temporary, start_waiting):
    job, _ = start_waiting("save", [signal.SIGINT, signal.SIGHUP])
    job.send_signal(signal.SIGINT)
    job.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    status, _, err = finish(job)
    assert status == 128 + signal.SIGTERM
    assert sorted((tmp_path / "saved").read_text().splitlines()) == ["0 SIGTERM", "1 SIGTERM"]
    assert err.splitlines()[1:] == ["stopped by SIGTERM"]


def test_a_second_signal_kills_the_ranks(temporary, start_waiting):
    job, pids = start_waiting("ignore")
    job.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    status, _, err = finish(job, 20)
    assert status == 128 + signal.SIGINT
    assert err.splitlines()[-1] == "stopped by Ctrl-C (SIGINT); ranks 0 and 1 had to be killed"
    assert all_ended(pids)


def test_ctrl_c_before_a_rank_has_started(tmp_path):
    job = start(["env", *ours("-n", "2", write(tmp_path, ""))])  # not forked, so that torch is not loaded yet
    assert isinstance(job, subprocess.Popen) and job.stderr is not None
    job.stderr.readline()  # the line about cores; torch is loaded next
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (128 + signal.SIGINT, "stopped by Ctrl-C (SIGINT)\n")


def test_a_rank_that_stops_slowly_is_reported(temporary, start_waiting):
    job, _ = start_waiting("slow")
    job.send_signal(signal.SIGTERM)
    time.sleep(SLOW_STOP_S + 2)
    job.send_signal(signal.SIGTERM)
    _, _, err = finish(job, 20)
    assert err.splitlines()[-2:] == [
        "waiting for rank 1 to stop (killed after 60 s; a second signal kills it immediately)",
        "stopped by SIGTERM; rank 1 had to be killed",
    ]


def test_the_processes_of_a_failed_rank_end_with_it(tmp_path):
    status, out, err = run(ours("-n", "1", write(tmp_path, LOADER)))
    assert status == 1
    assert "ValueError: no more" in err
    assert all_ended([int(out)])


def test_ranks_end_with_the_launcher(start_waiting):
    job, pids = start_waiting("ignore")
    job.kill()
    job.communicate()
    assert all_ended(pids)


def test_the_next_launcher_removes_the_folder_of_a_killed_launcher(tmp_path, start_waiting):
    job, _ = start_waiting("ignore")
    job.kill()
    job.communicate()
    (left,) = (tmp_path / "tmp").iterdir()
    program = write(tmp_path, "import os\nprint(os.listdir(os.environ['TMPDIR']))\n", "look.py")
    status, out, err = run(ours("-n", "1", program), TMPDIR=str(tmp_path / "tmp"))
    assert status == 0, err
    assert out.count("farandole-launch-") == 1 and left.name not in out
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_running_launcher_keeps_its_folder(tmp_path, start_waiting):
    start_waiting("ignore")
    (kept,) = (tmp_path / "tmp").iterdir()
    run(ours("-n", "1", write(tmp_path, "", "empty.py")), TMPDIR=str(tmp_path / "tmp"))
    assert list((tmp_path / "tmp").iterdir()) == [kept]


def test_two_concurrent_jobs_with_threads_and_without_pinning(tmp_path):
    program = write(tmp_path, HELLO)
    jobs = [
        start(ours("-n", "2", "--no-pin", "--threads", "2", program, name), fork_ranks=True) for name in "ab"
    ]
    every = str(sorted(os.sched_getaffinity(0)))
    for name, job in zip("ab", jobs, strict=True):
        status, out, err = finish(job)
        assert status == 0, err
        assert "not pinned" in err
        assert len(out.splitlines()) == 2
        assert all(line.split("|")[6:] == ["2", every, f"['{name}']"] for line in out.splitlines())


def start_nodes(program: str, *arguments: str):
    """Start a job on two hosts, both of which are this host."""
    place = f"127.0.0.1:{free_port()}"
    return [
        start(
            ours(
                "-n",
                "2",
                "--nodes",
                "2",
                "--node-rank",
                str(node),
                "--rendezvous",
                place,
                program,
                *arguments,
            ),
            fork_ranks=True,
        )
        for node in range(2)
    ]


def test_two_launchers_start_one_job(tmp_path):
    ends = [finish(job) for job in start_nodes(write(tmp_path, HELLO))]
    assert [status for status, _, _ in ends] == [0, 0], ends
    rows = [out.split("|")[:6] for _, out, _ in ends]
    assert rows == [[str(node), "2", "0", "1", "farandole launch", "3"] for node in range(2)]


def test_a_failure_on_one_host_stops_the_other(tmp_path):
    (_, _, first_err), (status, _, err) = [finish(job) for job in start_nodes(write(tmp_path, FAIL), "raise")]
    assert status == 1
    assert "ZeroDivisionError" in err
    assert "Traceback" not in first_err or "farandole.comm.errors" in first_err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "3", "--nodes", "2", "--rendezvous", "a:1", "x.py"], "divided evenly among --nodes 2"),
        (["--nodes", "2", "x.py"], "--nodes 2 requires --rendezvous HOST:PORT"),
        (
            ["--nodes", "2", "--node-rank", "2", "x.py"],
            "out of range for --nodes 2: expected a number from 0 to 1",
        ),
        (["--rendezvous", "node0", "x.py"], "expected HOST:PORT, such as node0:29500, got 'node0'"),
        (["progam.py"], "there is no script 'progam.py' here; nearest: program.py"),
        (["no/such/program.py"], "folder 'no/such' does not exist"),
        (["folder"], "'folder' is a folder, not a script; scripts in it: folder/inner.py"),
        (["package"], "'package' is a package, not a script; launch the package with -m package"),
        (["folder/iner.py"], "there is no script 'folder/iner.py' in folder; nearest: folder/inner.py"),
        (["-m", "no.such.module"], "there is no module 'no.such.module'"),
        (["-m", "program.py"], "to launch the script program.py, omit -m"),
        (["-m", "folder"], "'folder' is a package without a folder.__main__ module to run"),
        (
            ["--output-filename", "program.py/x", "program.py"],
            "--output-filename program.py/x: Not a directory",
        ),
    ],
)
def test_errors_are_reported_before_a_rank_starts(tmp_path, arguments, message):
    write(tmp_path, HELLO)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder", HELLO, "inner.py")
    (tmp_path / "package").mkdir()
    write(tmp_path / "package", HELLO, "__main__.py")
    status, out, err = run(ours("-n", "2", *arguments), tmp_path)
    assert status == 2
    assert message in err
    assert out == ""
