"""Run Python programs in processes that are forked after torch has been loaded, with the interface of `Popen`."""

from __future__ import annotations

import contextlib
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from farandole._startup import leave
from farandole.launch import child
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
        fork_ranks: fork the ranks that the program launches too, instead of starting a new interpreter for each.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: str | Path = ".",
        log: Path | None = None,
        ignored: Collection[int] = (),
        enter: Callable[[], None] | None = None,
        fork_ranks: bool = False,
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
            fork_ranks,
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

    def read_stderr(self) -> str:
        """Return what the process and its ranks have written to standard error until now."""
        return self._err.read_text() if self._err.exists() else ""

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
    fork_ranks: bool,
) -> None:
    """Run the program in this process, and exit."""
    os.chdir(folder)
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    _start_interpreter(environment)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if fork_ranks:
        torch.set_num_threads(1)  # a fork of a process that has used OpenMP's threads must not use them
        subprocess_handler.Popen = _popen  # torch's elastic agent starts ranks with it
    if enter is not None:
        enter()
    leave(_status_of(lambda: _run_arguments(arguments)))


def _start_interpreter(environment: Mapping[str, str]) -> None:
    """Bring this forked process into the state of a new interpreter in a new session, with torch loaded."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the environment may name another folder
    if "OMP_NUM_THREADS" in environment:  # torch reads the variable only when it is loaded
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a test runner may have replaced the streams of the forked process
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))


def _popen(args: Sequence[str], env: dict[str, str], **options: Any) -> Any:
    """Start a rank by a fork if it runs Python, and with `subprocess.Popen` otherwise."""
    if args[0] == sys.executable:
        return _ForkedRank([word for word in args[1:] if word != "-u"], env)
    return subprocess.Popen(args, env=env, **options)


class _ForkedRank:
    """A rank that is forked from its launcher, with the methods of `Popen` that torch's elastic agent calls."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            leave(_status_of(lambda: self._run(list(arguments), environment)))

    def _run(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the launcher deletes its own folders
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        _start_interpreter(environment)
        torch.manual_seed(torch.initial_seed())
        if arguments[:2] != ["-m", child.__name__]:  # another launcher
            _run_arguments(arguments)
            return
        shares = child.RankSpec.load(arguments[2]).shares
        torch.set_num_threads(shares[int(environment["LOCAL_RANK"])].threads)
        sys.modules.pop(arguments[3], None)  # the program runs as the module `__main__`
        child.main(arguments[2:])

    def poll(self) -> int | None:
        """Return `returncode`."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the rank ends; raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0)
            time.sleep(0.01)
        return status


def _status_of(program: Callable[[], None]) -> int:
    """Call the program, and return the exit status with which the interpreter would end."""
    try:
        program()
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


def _run_arguments(arguments: Sequence[str]) -> None:
    """Run the program like the interpreter."""
    sys.path.insert(0, os.getcwd())
    if list(arguments[:2]) == ["-m", "farandole"]:
        from farandole.cli.main import main

        sys.argv = ["-c", *arguments[2:]]  # so that messages show the command name `farandole`
        main()
    elif arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        child.run_script(os.path.abspath(arguments[0]))
