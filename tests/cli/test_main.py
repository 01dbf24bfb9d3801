"""The command line: help, versions, and messages for mistakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import farandole
from farandole import native
from farandole.cli.main import app


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), prog_name="farandole")


def test_help_shows_examples():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "farandole launch --ranks 4 script.py" in result.output
    for command in ("train", "generate", "launch", "info"):
        assert command in result.output


@pytest.mark.parametrize("command", ["train", "generate", "launch", "info"])
def test_every_command_shows_an_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"  farandole {command}" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lanch", "x.py"], "No such command 'lanch'. Did you mean 'launch'?"),
        (["zzz"], "No such command 'zzz'.\n"),
        (["bench", "colectives"], "Did you mean 'collectives'?"),
        (["launch", "--rnaks", "2", "x.py"], "--ranks"),
        (["launch", "--no-pinn", "x.py"], "--no-pin"),
        (["launch"], "Missing argument 'SCRIPT'"),
        (["launch", "--ranks", "0", "x.py"], "--ranks: expected an integer of at least 1, got '0'\n"),
        (["launch", "-n", "two", "x.py", "-np", "3"], "-n: expected an integer of at least 1, got 'two'\n"),
        (
            ["launch", "--ssh_port=x", "x.py"],
            "--ssh-port: expected an integer between 1 and 65535, got 'x'\n",
        ),
        (
            ["launch", "--start-timeout", "0", "x.py"],
            "--start-timeout: expected a number of at least 0.1, got '0'\n",
        ),
        (["plan", "--tensor", "2", "--tensor", "x"], "--tensor: expected an integer, got 'x'\n"),
        (["launch", "--rnks", "2", "x.py"], "unknown option --rnks; did you mean --ranks?"),
        (["launch", "--zzz", "x.py"], "unknown option --zzz\n"),
        (["train", "--resum"], "unknown option --resum; did you mean --resume?"),
        (
            ["launch", "--mpi", "x.py"],
            "--mpi is not supported: start the ranks with MPI's own launcher: mpirun -n 4",
        ),
        (["launch", "--gloo", "x.py"], "--gloo is not supported: omit it"),
        (["launch", "--min-np", "2", "x.py"], "use torchrun --nnodes MIN:MAX script.py"),
        (
            ["launch", "--host-discovery-script", "x.sh", "x.py"],
            "to name the hosts, use --hosts or --hostfile",
        ),
        (["launch", "--check-build"], "run `farandole info` to list the available features"),
        (["train", "--steps", "5"], "steps is a configuration key: use steps=VALUE"),
        (["train", "--lr", "0.1"], "use KEY=VALUE: did you mean optimizer.learning_rate?"),
        (["plan", "--rank", "2"], "did you mean --ranks?"),
        (["launch", "--nproc_per_node", "x", "x.py"], "expected auto, gpu, cpu or a positive number"),
        (["launch", "-n", "2", "--nproc-per-node", "2", "x.py"], "are mutually exclusive"),
        (["launch", "--nproc-per-node", "2", "-H", "a:2", "x.py"], "specify each host's slots"),
        (["launch", "--nnodes", "1:2", "x.py"], "use torchrun --nnodes MIN:MAX script.py"),
        (["launch", "--nnodes", "two", "x.py"], "to be an integer of at least 1, got 'two'"),
        (
            ["launch", "--nnodes", "2", "--rdzv-backend", "c10d", "x.py"],
            "requires --node-rank on each of the",
        ),
        (["launch", "--rdzv-backend", "etcd", "x.py"], "use c10d or static"),
        (
            ["launch", "--standalone", "--nnodes", "2", "x.py"],
            "--standalone starts a job on this host only and cannot be combined with --nodes",
        ),
        (
            ["launch", "--nodes", "2", "--master-port", "29500", "x.py"],
            "--master-addr HOST with --master-port PORT",
        ),
        (["launch", "--rdzv_id", "7", "x.py"], "the address of --rendezvous identifies the job"),
        (
            ["launch", "--rdzv-conf", "timeout=9", "x.py"],
            "use --start-timeout, the time in seconds that hosts wait",
        ),
        (["launch", "--log_level", "info", "x.py"], "logging.getLogger('farandole')"),
        (["launch", "--autotune", "x.py"], "set --fusion-threshold-mb and --cycle-time-ms manually"),
        (["launch", "--max-np", "2", "x.py"], "use torchrun --nnodes MIN:MAX script.py"),
        (["launch", "-p", "22", "x.py"], "--ssh-port requires --hosts or --hostfile"),
        (["launch", "--no-python", "no-such-command"], "there is no command 'no-such-command'"),
        (["launch", "python"], "python is not followed by a script"),
        (["launch", "python", "-O", "x.py"], "Python options are not supported"),
        (["launch", "python", "no-such.py"], "there is no script 'no-such.py'"),
        (["launch", "--hostfile", "no-such-file", "x.py"], "--hostfile no-such-file: No such file"),
        (["launch", "-H", "a:2", "--hostfile", "f", "x.py"], "--hosts and --hostfile are mutually exclusive"),
        (
            ["launch", "-H", "a:2", "--nodes", "2", "x.py"],
            "--hosts and --hostfile start the launchers on all hosts; omit --nodes",
        ),
        (["launch", "--ssh-port", "22", "x.py"], "--ssh-port requires --hosts or --hostfile"),
        (["launch", "--nics", "eth99", "-m", "json.tool"], "--network-interface eth99: this host"),
    ],
)
def test_mistakes_are_reported_with_the_nearest_name(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def commands() -> list[tuple[str, ...]]:
    """Return the words of all commands, such as ("bench", "training")."""

    def find(command: Any, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        if not hasattr(command, "commands"):
            return [words]
        return [found for name, inner in command.commands.items() for found in find(inner, (*words, name))]

    return find(typer.main.get_command(app), ())


@pytest.mark.parametrize("group", [(), ("bench",), ("config",)])
def test_a_list_of_commands_shows_their_descriptions_in_full(group):
    _, found, described = invoke(*group, "--help").output.partition("\nCommands:\n")
    assert found and "..." not in described, described
    assert all(re.match(r"  [a-z]+ +[A-Z].*\.$", line) for line in described.splitlines()), described


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_shows_placeholders_instead_of_types(words):
    output = invoke(*words, "--help").output
    assert not re.search(r"<[a-z]|[{}]|\[\[", output), output


def test_a_usage_line_marks_optional_arguments():
    assert "Usage: farandole launch [OPTIONS] SCRIPT [ARGS]...\n" in invoke("launch", "--help").output
    assert "Usage: farandole config explain [OPTIONS] KEY\n" in invoke("config", "explain", "--help").output
    assert "Missing argument 'KEY'" in invoke("config", "explain").output


def test_help_is_shown_without_a_command():
    assert "Usage: farandole" in invoke().output


def test_version():
    assert invoke("--version").output == f"farandole {farandole.__version__}\n"


def test_info():
    result = invoke("info")
    assert result.exit_code == 0
    assert torch.__version__ in result.output
    assert "alone: a job of 1 rank" in result.output
    assert ("not available: " if not native.available() else "available, ") in result.output


def test_a_report_has_limits_and_versions_and_no_secrets(monkeypatch):
    monkeypatch.setenv("FARANDOLE_JOB_KEY", "xyzzy")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    result = invoke("info", "--report")
    assert result.exit_code == 0
    assert result.output.startswith("```\n") and result.output.endswith("```\n")
    assert "xyzzy" not in result.output and "FARANDOLE_JOB_KEY=(hidden)" in result.output
    assert "OMP_NUM_THREADS=3" in result.output and "numpy " in result.output
    assert str(Path.home()) not in result.output


def test_info_shows_a_contradiction(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "rank 7 of 4" in invoke("info").output


def test_as_a_module():
    run = subprocess.run(
        [sys.executable, "-m", "farandole", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"farandole {farandole.__version__}\n"


def test_info_finds_launchers_next_to_the_interpreter(tmp_path):
    """If the virtual environment is not activated, none of its commands is on the path."""
    bare = {**os.environ, "PATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-m", "farandole", "info"], capture_output=True, text=True, check=True, env=bare
    )
    line = next(line for line in told.stdout.splitlines() if line.startswith("launchers"))
    torchrun = Path(sys.executable).with_name("torchrun")
    assert (str(torchrun) in line) == torchrun.exists()
