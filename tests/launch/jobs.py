"""Helpers for the launcher tests, which start small programs in real jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from tests.forked_python import ForkedPython

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 90
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, and with the package on PYTHONPATH."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return clean | {"PYTHONPATH": path} | more


def write(folder: Path, text: str, name: str = "program.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


Job = subprocess.Popen[str] | ForkedPython


def start(
    command: list[str],
    folder: str | Path = ".",
    ignored: Collection[int] = (),
    enter: Callable[[], None] | None = None,
    fork_ranks: bool = False,
    **more: str,
) -> Job:
    """Start a job in a new session.

    A command that begins with the test interpreter is forked from a process that has loaded torch.  To start a new
    interpreter, put `env` before the interpreter.  `ignored`, `enter` and `fork_ranks` are passed to `ForkedPython`.
    """
    if command[0] == sys.executable:
        own = environment(**more)
        return ForkedPython(command[1:], own, folder, ignored=ignored, enter=enter, fork_ranks=fork_ranks)
    assert not ignored and enter is None and not fork_ranks, "these options require a forked interpreter"
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(job: Job, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    """Return the exit status and the output of a job; after `limit_s` seconds, kill the job and fail the test."""
    try:
        out, err = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, err = job.communicate()
        raise AssertionError(f"the job did not end within {limit_s} s; its output:\n{out}\n{err}") from None
    assert job.returncode is not None
    return job.returncode, out, err


def run(
    command: list[str], folder: str | Path = ".", *, fork_ranks: bool = False, **more: str
) -> tuple[int, str, str]:
    return finish(start(command, folder, fork_ranks=fork_ranks, **more))


def ours(*arguments: str) -> list[str]:
    """Return the command line of `farandole launch`."""
    return [sys.executable, "-m", "farandole", "launch", *arguments]


def wait_for_lines(path: Path, count: int, limit_s: float = 60) -> list[str]:
    """Wait until a file that ranks write has `count` lines, and return these lines."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(0.05)
    raise AssertionError(f"expected {count} lines in {path} within {limit_s} s, got fewer")


def all_ended(pids: list[int], limit_s: float = 10) -> bool:
    """Return whether all processes end within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while any(_is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
