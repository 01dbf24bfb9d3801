"""Run Python programs in processes that are forked after torch has been loaded, with the interface of `Popen`."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch

from farandole._startup import leave
from farandole.launch.child import run_script
from tests.forking import CONTEXT

_TEMPORARY = tempfile.gettempdir()  # a test may set another folder for its job


class ForkedPython:
    """A process that runs `python ARGUMENTS...` in a new session.

    Args:
        arguments: a script or `-m MODULE`, with its arguments.
        environment: the environment of the process.
        folder: the working directory.
        log: the file for standard output and error; by default, two temporary files are used.
        ignored: signals that the process ignores, as under nohup.
        enter: a function that the process calls first, for example to change its namespaces.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: str | Path = ".",
        log: Path | None = None,
        ignored: Collection[int] = (),
        enter: Callable[[], None] | None = None,
    ) -> None:
        self._kept = tempfile.TemporaryDirectory(prefix="farandole-forked-", dir=_TEMPORARY)
        self._out, self._err = (log or Path(self._kept.name, name) for name in ("out", "err"))
        order = (
            list(arguments),
            dict(environment),
            str(Path(folder).absolute()),
            self._out,
            self._err,
            ignored,
            enter,
        )
        self._process = CONTEXT.Process(target=_run, args=order, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends; raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until the process ends, and return the standard output and error of the process and its ranks."""
        self.wait(timeout)
        return self._out.read_text(), self._err.read_text()

    def send_signal(self, number: int) -> None:
        """Send a signal if the process is still running."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


def _run(
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    out: Path,
    err: Path,
    ignored: Collection[int],
    enter: Callable[[], None] | None,
) -> None:
    """Run the program in this process, and exit."""
    os.setsid()
    os.chdir(folder)
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the environment may name another folder
    if "OMP_NUM_THREADS" in environment:  # torch reads the variable only when it is loaded
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    # a test runner may have replaced the streams of the forked process
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    if enter is not None:
        enter()
    leave(_status_of(arguments))


def _status_of(arguments: list[str]) -> int:
    """Run the program like the interpreter, and return its exit status."""
    sys.path.insert(0, os.getcwd())
    try:
        if arguments[:2] == ["-m", "farandole"]:
            from farandole.cli.main import main

            sys.argv = ["-c", *arguments[2:]]  # so that messages show the command name `farandole`
            main()
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            run_script(os.path.abspath(arguments[0]))
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
