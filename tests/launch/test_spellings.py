"""Test that `farandole launch` accepts the command lines of torchrun and horovodrun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from farandole.cli.launcher_options import ALTERNATIVES, HOROVODRUN, TORCHRUN
from farandole.cli.main import app
from farandole.launch import limits, local
from farandole.launch.cores import usable_cores
from farandole.launch.placement import LaunchError
from farandole.launch.program import without_python
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
        ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "PROGRAM", "a"],
        ["-n", "2", "python", "-m", "program", "a"],
        ["-n", "2", "--no-python", sys.executable, "PROGRAM", "a"],
    ],
    ids=["horovodrun", "torchrun", "torchrun-c10d", "torchrun-free-port", "module", "no-python"],
)
def test_command_lines_of_other_launchers(tmp_path: Path, words: list[str]) -> None:
    program = write(tmp_path, PROGRAM)
    command = ours(*(program if word == "PROGRAM" else word for word in words))
    status, out, err = run(command, tmp_path, PYTHONPATH=f"{environment()['PYTHONPATH']}:{tmp_path}")
    assert status == 0, err
    assert sorted(out.splitlines()) == ["0|2|0|||a", "1|2|0|||a"]


@pytest.mark.parametrize("linked", [False, True], ids=["interpreter", "virtual-environment"])
def test_the_interpreter_of_another_environment_is_refused(tmp_path: Path, linked: bool) -> None:
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for word in ("python", "python3", own, sys.executable):
        assert without_python([word, "a.py"]) == ("script", ["a.py"])
    (tmp_path / "bin").mkdir()
    other = tmp_path / "bin" / "python3"
    if linked:
        other.symlink_to(os.path.realpath(sys.executable))
        write(tmp_path, "", "pyvenv.cfg")
    else:
        write(other.parent, "", "python3")
    for word in (str(other), "python2.7", f"{own}9"):
        with pytest.raises(LaunchError, match=f"not with {re.escape(word)}; omit .* --no-python"):
            without_python([word, "a.py"])


def test_a_command_instead_of_a_script_is_refused() -> None:
    result = CliRunner().invoke(app, ["launch", "-n", "1", "env", "ls"])
    assert result.exit_code == 2
    assert f"to launch the command {shutil.which('env')}, use --no-python" in result.output


def parameters() -> dict[str, Any]:
    """Return the parameters of `farandole launch` by option name."""
    command: Any = typer.main.get_command(app)
    return {name: param for param in command.commands["launch"].params for name in param.opts}


def test_every_option_of_torchrun_is_accepted_or_has_an_alternative() -> None:
    own = parameters()
    for action in get_args_parser()._actions:
        for name in {name.replace("_", "-") for name in action.option_strings} - {"-h", "--help"}:
            assert name in TORCHRUN
            if TORCHRUN[name] is None:
                assert own[name].is_flag == (action.nargs == 0), name


@pytest.mark.parametrize("options", [TORCHRUN, HOROVODRUN], ids=["torchrun", "horovodrun"])
def test_accepted_options_of_other_launchers_exist(options: dict[str, str | None]) -> None:
    accepted = {name for name, alternative in options.items() if alternative is None}
    assert accepted <= {*parameters(), "--help"}


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_rejected_options_of_other_launchers_name_the_alternative(name: str) -> None:
    for spelling in (name, name[:2] + name[2:].replace("-", "_")):
        result = CliRunner().invoke(app, ["launch", "-n", "1", spelling, "1", "program.py"])
        assert result.exit_code == 2
        assert ALTERNATIVES[name] in result.output


@pytest.mark.parametrize(
    ("words", "address", "interfaces"),
    [
        (["--master-port", "29533"], (("127.0.0.1",), 29533), None),
        (["--master-addr", "node0"], (("node0",), 29500), None),
        (["--rdzv-endpoint", "localhost:0"], ((), 0), None),
        (["--network-interface", "eth0", "--network-interface", "eth1"], ((), 0), "eth0,eth1"),
        (["--network-interfaces", "eth0,eth1"], ((), 0), "eth0,eth1"),
    ],
)
def test_addresses_and_interfaces(
    words: list[str],
    address: tuple[tuple[str, ...], int],
    interfaces: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs: list[Any] = []
    monkeypatch.setattr(local, "run_on_this_host", lambda program, ranks, config: configs.append(config) or 0)
    result = CliRunner().invoke(app, ["launch", "-n", "1", *words, "program.py"])
    assert result.exit_code == 0, result.output
    assert ((configs[0].addresses, configs[0].port), configs[0].interfaces) == (address, interfaces)


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


def test_restarted_ranks_append_to_their_output_files(tmp_path: Path) -> None:
    (tmp_path / "rank.1").mkdir()
    write(tmp_path / "rank.1", "an earlier job\n", "stdout")
    words = ["--max-restarts", "1", "--output-filename", str(tmp_path), write(tmp_path, PROGRAM), "fail", "0"]
    status, _, err = run(ours("-n", "2", *words))
    assert status == 0, err
    assert (tmp_path / "rank.1" / "stdout").read_text().splitlines() == [
        f"1|2|{restart}|||fail|0" for restart in range(2)
    ]


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
