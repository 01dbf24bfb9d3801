"""The launcher of one host of a job that was started elsewhere: `python -m farandole.launch.node`.

Who started it speaks through standard input: first a line of orders, then the number of a signal on each line.
When that input ends, so has whoever wrote it, however it ended and however far away it was, and so does this
launcher.
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
from farandole.launch.gathering import Gathering
from farandole.launch.interfaces import chosen, use
from farandole.launch.local import run_here
from farandole.launch.placement import LaunchError
from farandole.launch.program import Program
from farandole.launch.signals import restore_ignored_signals


@dataclass(frozen=True)
class NodeOrders:
    """What the launcher of a host is told."""

    host: str
    """The name by which it was reached."""
    folder: str
    """Where to run."""
    environment: Mapping[str, str]
    """Variables to set."""
    program: Program
    ranks: int
    """How many ranks this host gets."""
    gathering: Gathering
    interfaces: str | None = None
    """The network interfaces that the user wants to be used."""

    def dump(self) -> str:
        """As JSON, in one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> NodeOrders:
        """From JSON."""
        fields = json.loads(text)
        program, gathering = fields.pop("program"), fields.pop("gathering")
        return NodeOrders(
            **fields,
            program=Program(**program | {"arguments": tuple(program["arguments"])}),
            gathering=Gathering(**gathering | {"addresses": tuple(gathering["addresses"])}),
        )


def main() -> None:
    """Carry out the orders that come through standard input."""
    restore_ignored_signals()  # signals come through standard input only, and `_obey` needs them
    lifeline = _take_input()
    text = lifeline.readline()
    if not text:
        sys.exit("farandole.launch.node is started by `farandole launch --hosts`, which tells it what to do")
    orders = NodeOrders.load(text)
    # A signal that comes before the ranks are watched ends this process.
    threading.Thread(target=_obey, args=(lifeline,), daemon=True).start()
    try:
        status = _carry_out(orders)
    except LaunchError as error:
        print(f"farandole launch, on {orders.host}: {error}", file=sys.stderr, flush=True)
        status = 2
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    leave(status)


def _carry_out(orders: NodeOrders) -> int:
    os.environ.update(orders.environment)
    try:
        os.chdir(orders.folder)
    except OSError as error:
        raise LaunchError(
            f"cannot run in {orders.folder}: {error.strerror}; hosts share the folder of the job"
        ) from error
    if not orders.program.module:
        sys.path[0] = ""
    if orders.interfaces is not None:
        use(",".join(chosen(orders.interfaces)))
    return run_here(orders.program, orders.ranks, orders.gathering, name=orders.host)


def _take_input() -> TextIOWrapper:
    """Standard input, which is no longer that of this process: its ranks must not read from it."""
    own = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return TextIOWrapper(os.fdopen(own, "rb"))


def _obey(lifeline: TextIOWrapper) -> None:
    """Pass on the signals that are told; at the end of input, end at once."""
    for line in lifeline:
        os.kill(os.getpid(), int(line))
    # Two signals, which are not merged into one because they differ: the second kills the ranks.
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
