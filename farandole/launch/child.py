"""Run the program as one rank of `farandole launch`: `python -m farandole.launch.child SPEC TARGET ARGS...`.

This module pins the rank to its cores, makes the kernel kill the rank when the launcher ends, and runs the program as
Python would.  An exception that ends the program is written to a file for the launcher, which prints it once.  This
module does not import torch, because the number of threads must be set first.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import runpy
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from farandole._exceptions import message_of
from farandole._startup import leave, pause_collection
from farandole.launch.cores import Share
from farandole.launch.reports import ErrorReport, write_report

if TYPE_CHECKING:
    from farandole.launch.program import Kind

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankSpec:
    """The settings for the ranks of a host, passed as JSON in a single command-line argument."""

    launcher_pid: int
    shares: tuple[Share, ...]
    kind: Kind
    output: str | None = None
    """The folder for the ranks' output, or None to print the output."""
    shim: str | None = None
    """A module whose function `install` is called before the script or module runs."""

    def dump(self) -> str:
        """Return the spec as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def load(text: str) -> RankSpec:
        """Convert the result of `dump` back to a spec."""
        fields = json.loads(text)
        return RankSpec(**fields | {"shares": tuple(Share(**share) for share in fields["shares"])})


def main(arguments: list[str]) -> None:
    """Run the user's program as rank LOCAL_RANK of this host; on failure, exit with the program's status."""
    text, target, *program_arguments = arguments
    spec = RankSpec.load(text)
    die_with_parent(spec.launcher_pid)
    _apply_share(spec.shares[int(os.environ["LOCAL_RANK"])])
    if spec.output is not None:
        _redirect_output(spec.output)
    if hasattr(sys.stdout, "reconfigure"):
        # Prevents lines of different ranks from interleaving, and a killed rank from losing lines.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.argv = [target, *program_arguments]
    own = spec.kind == "module" and target.startswith("farandole.")
    try:
        if own:
            pause_collection()
        if spec.kind == "command":
            _run_command(target, program_arguments)
        if spec.shim is not None:
            importlib.import_module(spec.shim).install()
        if spec.kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            run_script(os.path.abspath(target))
        if own:
            leave(0)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as end:
        if end.code in (None, 0):
            raise
        _fail(_exit_report(end.code))
    except BaseException as error:  # report it and end the process
        sys.last_value = error  # as the interpreter does; `comm.ending` sends it to the other ranks
        _fail(_error_report(error))


def _run_command(name: str, arguments: list[str]) -> NoReturn:
    """Replace this process with a command."""
    if sys.stdout is not None:
        sys.stdout.flush()
    # exec preserves the CPU affinity and the signal that kills the rank when the launcher ends
    os.execvp(name, [name, *arguments])


def run_script(path: str) -> None:
    """Run a script as `python path` does: as the module `__main__`, with `path` as its file name."""
    sys.path[0] = os.path.dirname(os.path.realpath(path))  # the folder of a symbolic link's target
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    program = ModuleType("__main__")
    program.__file__ = path
    sys.modules["__main__"] = program
    exec(code, program.__dict__)


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent `parent_pid` ends (Linux only)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before the call
        sys.exit(128 + signal.SIGKILL)


def _apply_share(share: Share) -> None:
    """Pin this process, and set the number of threads for libraries loaded later."""
    os.environ["OMP_NUM_THREADS"] = str(share.threads)
    if share.processors:
        os.sched_setaffinity(0, share.processors)


def _redirect_output(folder: str) -> None:
    """Redirect this rank's output to the files `stdout` and `stderr` in `folder`/rank.N, as horovodrun does."""
    restarted = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0
    mode = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if restarted else os.O_TRUNC)
    width = len(str(int(os.environ["WORLD_SIZE"]) - 1))
    own = os.path.join(folder, f"rank.{os.environ['RANK']:0>{width}}")
    os.makedirs(own, exist_ok=True)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a stream is None if its descriptor was closed
        path = os.path.join(own, stream.name.strip("<>"))
        file = os.open(path, mode, 0o666)
        os.dup2(file, stream.fileno())
        os.close(file)


def _error_report(error: BaseException) -> ErrorReport:
    trace = "".join(traceback.format_exception(type(error), error, _program_frames(error.__traceback__)))
    return ErrorReport(type(error).__name__, message_of(error), trace, _is_consequence(error))


def _exit_report(code: object) -> ErrorReport:
    """Return the report for `sys.exit(code)`, where `code` is an exit status or a message."""
    if isinstance(code, int):
        return ErrorReport(kind="SystemExit", message=f"exit status {code}", trace="", status=code & 0xFF)
    return ErrorReport(kind="SystemExit", message=str(code), trace=f"{code}\n")


def _fail(report: ErrorReport) -> NoReturn:
    """Write the report for the launcher, and exit.  If the report cannot be written, print its traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        write_report(path or "", report)
    except OSError:
        sys.stderr.write(report.trace)
    sys.exit(report.status)


def _program_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that start the program, or None if no frames remain."""
    starting = (__file__, runpy.__file__)
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in starting and not name.startswith(("<frozen runpy", "<frozen importlib")):
            break
        trace = trace.tb_next
    return trace


def _is_consequence(error: BaseException | None) -> bool:
    """Return whether *another* rank's failure caused `error` (a communication error of farandole or Gloo)."""
    errors = sys.modules.get("farandole.comm.errors")
    while error is not None:
        if errors is not None and isinstance(error, errors.CommunicationError):
            return True
        if "gloo/transport" in message_of(error):
            return True
        error = error.__cause__
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
