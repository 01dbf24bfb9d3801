"""Starting a job on several hosts: a launcher on each, through a remote shell, and a store for all of them here.

A launcher gets its orders through the remote shell's standard input, which also tells it of signals and, by its
end, that this process is gone.  What the ranks print comes back as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import farandole
from farandole.launch.cores import count
from farandole.launch.gathering import Gathering
from farandole.launch.hosts import Host, is_here
from farandole.launch.interfaces import chosen, use
from farandole.launch.local import run_here
from farandole.launch.meeting import LOOPBACK
from farandole.launch.node import NodeOrders
from farandole.launch.placement import LaunchError
from farandole.launch.program import Program
from farandole.launch.reports import stopped_by
from farandole.launch.signals import signals_to_handle
from farandole.launch.target import check_target

LEAVE_S = 8.0
"""How long the launchers of the other hosts have, in seconds, to stop once one has failed."""

OF_THIS_HOST = re.compile(
    r"HOME|HOSTNAME|USER|LOGNAME|SHELL|SHLVL|PWD|OLDPWD|TMPDIR|TERM|_|DISPLAY|LS_COLORS|(SSH|XDG|DBUS|BASH_FUNC)_.*"
)
"""Variables that say something of the host, or of the session, and are not passed on to others."""

SSH_REFUSED = 255
"""The exit status of ssh where it could not connect."""
NOT_FOUND = 127
"""The exit status of `env` where it did not find a command."""


@dataclass(frozen=True)
class RemoteShell:
    """The command that runs a command on another host, as in `ssh HOST COMMAND...`."""

    command: str = "ssh"
    port: int | None = None
    identity: Path | None = None

    def reach(self, host: str, command: Sequence[str]) -> list[str]:
        """The words that run `command` on `host`; ssh asks for no passwords, which nobody could type."""
        words = shlex.split(self.command)
        if not words:
            raise LaunchError(
                "--remote-shell is empty; it is a command like ssh, before a host and a command"
            )
        if Path(words[0]).name == "ssh":
            words += ["-o", "BatchMode=yes"]
            words += ["-p", str(self.port)] if self.port is not None else []
            words += ["-i", str(self.identity)] if self.identity is not None else []
        elif self.port is not None or self.identity is not None:
            raise LaunchError(
                f"--ssh-port and --ssh-identity-file are for ssh, and the remote shell is {self.command!r}"
            )
        return [*words, host, *(shlex.quote(word) for word in command)]


def launch_on(
    hosts: Sequence[Host],
    program: Program,
    *,
    shell: RemoteShell,
    interfaces: str | None,
    start_timeout_s: float,
) -> int:
    """Run a program in `slots` ranks on each host; return the exit status of the host that failed first, or 0.

    Ranks are numbered in the order of the hosts.  The Python of this process and this folder must be there on
    every host under the same names.  Raises `LaunchError` for what is wrong before anything is started.
    """
    here = [is_here(host.name) for host in hosts]
    if here == [True]:
        if interfaces is not None:
            use(",".join(chosen(interfaces)))
        return run_here(program, hosts[0].slots, Gathering())
    if any(here):
        check_target(program.target, program.module)
    ways = {"lo": LOOPBACK} if all(here) and interfaces is None else chosen(interfaces)
    if not ways:
        raise LaunchError(
            "this host has no network interface with an IPv4 address for the other hosts to reach"
        )
    listener = socket.create_server((LOOPBACK if all(here) and interfaces is None else "", 0))
    environment = {name: text for name, text in os.environ.items() if not OF_THIS_HOST.fullmatch(name)}
    nodes = []
    for number, host in enumerate(hosts):
        orders = NodeOrders(
            host=host.name,
            folder=os.getcwd(),
            environment=environment,
            program=program,
            ranks=host.slots,
            gathering=Gathering(
                nodes=len(hosts),
                node=number,
                addresses=tuple(ways.values()),
                port=listener.getsockname()[1],
                keeps_store=False,
                local=here[number],
                choose_interface=len(hosts) > 1 and interfaces is None,
                timeout_s=start_timeout_s,
            ),
            interfaces=interfaces,
        )
        nodes.append((host.name, _command(host.name, here[number], shell), orders))
    return _Job(nodes, listener, program.verbose).run()


def _command(host: str, here: bool, shell: RemoteShell) -> list[str]:
    """What starts the launcher of a host: the same Python, which finds this package where this one did."""
    package = str(Path(farandole.__file__).parent.parent)
    paths = [package, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != package)]
    command = ["env", f"PYTHONPATH={os.pathsep.join(paths)}", sys.executable, "-m", "farandole.launch.node"]
    return command if here else shell.reach(host, command)


class _Job:
    """The launchers of a job's hosts, from their start to their end."""

    def __init__(
        self, nodes: Sequence[tuple[str, list[str], NodeOrders]], listener: socket.socket, verbose: bool
    ) -> None:
        self._nodes = nodes
        self._listener = listener
        self._verbose = verbose
        self._signals: list[int] = []
        self._told = 0
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> int:
        before = {number: signal.signal(number, self._on_signal) for number in signals_to_handle()}
        try:
            self._start()
            return self._follow()
        finally:
            for launcher in self._launchers.values():
                _end(launcher)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        for host, command, orders in self._nodes:
            if self._verbose:
                _say(f"{host}: {count(orders.ranks, 'rank')}, started by {shlex.join(command)}")
            try:
                # A session of its own: Ctrl-C in the terminal is passed on, and not sent twice.
                launcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                raise LaunchError(
                    f"cannot run {command[0]!r} to reach {host}: {error.strerror}; --remote-shell names "
                    f"another command"
                ) from error
            self._launchers[host] = launcher
            _write(launcher, orders.dump())

    def _follow(self) -> int:
        """Keep the store, pass on signals, and stop all hosts when one fails."""
        # torch costs seconds to import, in which the other launchers import it too
        import torch.distributed as dist

        from farandole.launch.rendezvous import FAILED

        store = dist.TCPStore(
            self._nodes[0][2].gathering.addresses[0],
            self._listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        first_failure: tuple[str, int] | None = None
        give_up_at: float | None = None
        while running := [launcher for launcher in self._launchers.values() if launcher.poll() is None]:
            self._pass_on_signals(running)
            failed = [(host, node.returncode) for host, node in self._launchers.items() if node.returncode]
            if failed and first_failure is None:
                first_failure, give_up_at = failed[0], time.monotonic() + LEAVE_S
                if not self._signals and not store.check([FAILED]):
                    store.set(FAILED, _ending(*failed[0]))
            if give_up_at is not None and not self._signals and time.monotonic() > give_up_at:
                for launcher in running:
                    _end(launcher)
            time.sleep(0.05)
        return self._conclude(first_failure)

    def _conclude(self, first_failure: tuple[str, int] | None) -> int:
        if self._signals:
            _say(stopped_by(self._signals[0], ()))
            return 128 + self._signals[0]
        if first_failure is None:
            first_failure = next(
                ((h, n.returncode) for h, n in self._launchers.items() if n.returncode), None
            )
        if first_failure is None:
            return 0
        host, status = first_failure
        _say(_ending(host, status))
        return 128 - status if status < 0 else status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_on_signals(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        """The first signal is told; with the second the input of every launcher ends, and so do they."""
        if len(self._signals) == self._told:
            return
        for launcher in running:
            if self._told == 0:
                _write(launcher, str(int(self._signals[0])))
            else:
                _close(launcher)
        self._told = len(self._signals)


def _ending(host: str, status: int) -> str:
    if status == SSH_REFUSED:
        return f"the remote shell could not reach {host}, or lost it (exit status {status})"
    if status == NOT_FOUND:
        return f"{host} has no {sys.executable}: the hosts of a job need the same Python at the same place"
    if status < 0:
        return f"the launcher of {host} was killed by {signal.Signals(-status).name}"
    return f"the job ended on {host} with exit status {status}"


def _write(launcher: subprocess.Popen[bytes], line: str) -> None:
    assert launcher.stdin is not None  # for the type checker: it is a pipe
    with contextlib.suppress(BrokenPipeError):  # it has ended, which `_follow` sees
        launcher.stdin.write(line.encode() + b"\n")
        launcher.stdin.flush()


def _close(launcher: subprocess.Popen[bytes]) -> None:
    assert launcher.stdin is not None  # for the type checker: it is a pipe
    with contextlib.suppress(BrokenPipeError):  # it has ended, which `_follow` sees
        launcher.stdin.close()


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End a launcher by the end of its input; kill what does not listen."""
    _close(launcher)
    try:
        launcher.wait(timeout=LEAVE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
