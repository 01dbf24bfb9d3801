"""Run the launcher of one host, for a job that one command starts on several hosts.

The command runs `python -m farandole.launch.node` on each host, and writes to this launcher's standard input.  The
first line is a `NodeSpec`.  Each later line is the number of a signal to raise.  The input ends when the command ends;
then this launcher also ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import TextIOWrapper

from farandole._startup import leave
from farandole.launch.hosts import RendezvousConfig
from farandole.launch.local import run_on_this_host
from farandole.launch.monitor import restore_ignored_signals
from farandole.launch.placement import LaunchError
from farandole.launch.program import Program
from farandole.launch.reports import notify


@dataclass(frozen=True)
class NodeSpec:
    """Describes the part of a job that one host's launcher runs."""

    host: str
    """The host's name, as used by the remote shell."""
    folder: str
    """The working directory of the ranks."""
    environment: Mapping[str, str]
    """The environment variables to set."""
    program: Program
    ranks: int
    """The number of ranks on this host."""
    rendezvous: RendezvousConfig

    def dump(self) -> str:
        """Return the spec as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> NodeSpec:
        """Convert the result of `dump` back to a spec."""
        fields = json.loads(text)
        program, rendezvous = Program(**fields["program"]), RendezvousConfig(**fields["rendezvous"])
        return NodeSpec(**fields | {"program": program, "rendezvous": rendezvous})


def main() -> None:
    """Read a `NodeSpec` from standard input, and run the ranks that it describes."""
    restore_ignored_signals()  # signals arrive through standard input only, and `_raise_signals` raises them
    control = _detach_input()
    text = control.readline()
    if not text:
        sys.exit(
            "farandole.launch.node cannot be started directly; use `farandole launch --hosts`, which writes its "
            "input"
        )
    spec = NodeSpec.load(text)
    # A signal that arrives before the ranks are monitored ends this process.
    threading.Thread(target=_raise_signals, args=(control,), daemon=True).start()
    try:
        status = _run(spec)
    except LaunchError as error:
        notify(f"farandole launch, on {spec.host}: {error}")
        status = 2
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    leave(status)


def _run(spec: NodeSpec) -> int:
    os.environ.update(spec.environment)
    try:
        os.chdir(spec.folder)
    except OSError as error:
        raise LaunchError(
            f"cannot run in {spec.folder}: {error.strerror}; create the job's working directory on every host"
        ) from error
    if spec.program.kind != "module":
        sys.path[0] = ""
    return run_on_this_host(spec.program, spec.ranks, spec.rendezvous, name=spec.host)


def _detach_input() -> TextIOWrapper:
    """Return the original standard input, and redirect descriptor 0, which the ranks inherit, to /dev/null."""
    own = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return TextIOWrapper(os.fdopen(own, "rb"))


def _raise_signals(control: TextIOWrapper) -> None:
    """Raise the signals read from `control`; when the input ends, raise two more signals to kill the ranks."""
    for line in control:
        os.kill(os.getpid(), int(line))
    # Use two different signals, because the kernel may merge equal signals.  The second signal kills the ranks.
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
