"""What runs in each rank of `farandole launch`: `python -m farandole.launch.child ORDERS TARGET ARGS...`.

It takes this rank's cores, arranges to die with the launcher, and runs the program as Python would have
run it.  An exception that ends the program is written to a file for the launcher, which shows it once.
Imports nothing heavy: the number of threads must be set before torch is loaded.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import runpy
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from types import ModuleType, TracebackType
from typing import NoReturn

from farandole._startup import leave, pause_collection
from farandole.launch.cores import Share
from farandole.launch.reports import ErrorReport, write_report

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Orders:
    """What the launcher wants of its ranks; one argument of their command lines, as JSON."""

    launcher_pid: int
    shares: tuple[Share, ...]
    module: bool
    output: str | None = None
    """The folder for what the ranks print."""

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def load(text: str) -> Orders:
        """From JSON."""
        fields = json.loads(text)
        shares = tuple(Share(share["threads"], tuple(share["processors"])) for share in fields["shares"])
        return Orders(fields["launcher_pid"], shares, fields["module"], fields["output"])


def main(arguments: list[str]) -> None:
    """Run the program that the launcher asked for, as rank LOCAL_RANK of this host."""
    orders, target, *program_arguments = arguments
    run(Orders.load(orders), target, program_arguments)


def run(orders: Orders, target: str, arguments: list[str]) -> None:
    """Run a script or a module; does not return where it fails."""
    die_with(orders.launcher_pid)
    take_share(orders.shares[int(os.environ["LOCAL_RANK"])])
    if orders.output is not None:
        print_to(orders.output)
    if hasattr(sys.stdout, "reconfigure"):
        # Lines of several ranks stay whole, and none is lost with a rank that is killed.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.argv = [target, *arguments]
    own = orders.module and target.startswith("farandole.")
    try:
        if own:
            pause_collection()
        if orders.module:
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
    except BaseException as error:  # reported, and the process ends
        sys.last_value = error  # as the interpreter would: the other ranks are told what ended this one
        _fail(_report(error))


def run_script(path: str) -> None:
    """Run a script as `python path` does: under its full name, as the module `__main__`."""
    sys.path[0] = os.path.dirname(path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    program = ModuleType("__main__")
    program.__file__ = path
    sys.modules["__main__"] = program
    exec(code, program.__dict__)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when `parent_pid`, its parent, ends in whatever way (Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call
        sys.exit(128 + signal.SIGKILL)


def take_share(share: Share) -> None:
    """Keep to this rank's cores; the libraries that are loaded later read the number of threads."""
    os.environ["OMP_NUM_THREADS"] = str(share.threads)
    if share.processors:
        os.sched_setaffinity(0, share.processors)


def print_to(folder: str) -> None:
    """Let this rank, and what it starts, print to files: FOLDER/rank.N/stdout and stderr, as horovodrun has it."""
    width = len(str(int(os.environ["WORLD_SIZE"]) - 1))
    own = os.path.join(folder, f"rank.{os.environ['RANK']:0>{width}}")
    os.makedirs(own, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        file = os.open(
            os.path.join(own, stream.name.strip("<>")), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666
        )
        os.dup2(file, stream.fileno())
        os.close(file)


def _report(error: BaseException) -> ErrorReport:
    trace = "".join(traceback.format_exception(type(error), error, _of_program(error.__traceback__)))
    return ErrorReport.now(
        kind=type(error).__name__, message=str(error), trace=trace, consequence=_is_consequence(error)
    )


def _exit_report(code: object) -> ErrorReport:
    """The report of sys.exit(7), or of sys.exit("message"), which has a message and no trace."""
    if isinstance(code, int):
        return ErrorReport.now(kind="SystemExit", message=f"exit status {code}", trace="", status=code & 0xFF)
    return ErrorReport.now(kind="SystemExit", message=str(code), trace=f"{code}\n")


def _fail(report: ErrorReport) -> NoReturn:
    """Leave the report for the launcher; without one (it could not be written) show it here."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        write_report(path or "", report)
    except OSError:
        sys.stderr.write(report.trace)
    sys.exit(report.status)


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """The trace without the frames that start the program; None where it did not start (a syntax error)."""
    starting = (__file__, runpy.__file__)
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in starting and not name.startswith(("<frozen runpy", "<frozen importlib")):
            break
        trace = trace.tb_next
    return trace


def _is_consequence(error: BaseException | None) -> bool:
    """Whether an exception tells that *another* rank failed: a communication error, ours or Gloo's."""
    errors = sys.modules.get("farandole.comm.errors")
    while error is not None:
        if errors is not None and isinstance(error, errors.CommunicationError):
            return True
        if "gloo/transport" in str(error):
            return True
        error = error.__cause__
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
