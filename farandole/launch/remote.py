"""Start a job on several hosts.

This process starts a launcher on each host through a remote shell, and serves the store of the job.

A launcher reads its `NodeSpec` and signal numbers from the standard input of the remote shell.  When this process ends,
the input ends, and the launcher stops its ranks.  The output of the ranks is printed unchanged.
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
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import farandole
from farandole.launch.hosts import LOOPBACK, Host, RendezvousConfig, find_interfaces, is_this_host
from farandole.launch.local import key_for_ranks, run_on_this_host
from farandole.launch.monitor import restored_handlers, signals_to_handle
from farandole.launch.node import NodeSpec
from farandole.launch.placement import LaunchError
from farandole.launch.program import Program
from farandole.launch.reports import count, describe_stop, notify

STOP_TIMEOUT_S = 8.0
"""How long, in seconds, the other launchers may take to stop after one launcher has failed."""

HOST_VARIABLES = re.compile(
    r"HOME|HOSTNAME|USER|LOGNAME|SHELL|SHLVL|PWD|OLDPWD|TMPDIR|TERM|_|DISPLAY|LS_COLORS|(SSH|XDG|DBUS|BASH_FUNC)_.*"
)
"""Variables that describe the host or the session, and are not sent to other hosts."""


@dataclass(frozen=True)
class RemoteShell:
    """A command that runs other commands on a host, such as ssh in `ssh HOST COMMAND...`."""

    command: str = "ssh"
    port: int | None = None
    identity: Path | None = None

    def command_on(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on `host`; ssh does not prompt for passwords."""
        words = shlex.split(self.command)
        if not words:
            raise LaunchError("--remote-shell is empty; expected a command such as ssh")
        if Path(words[0]).name == "ssh":
            words += ["-o", "BatchMode=yes"]
            words += ["-p", str(self.port)] if self.port is not None else []
            words += ["-i", str(self.identity)] if self.identity is not None else []
        elif self.port is not None or self.identity is not None:
            raise LaunchError(
                f"--ssh-port and --ssh-identity-file require ssh, but the remote shell is {self.command!r}; omit these options"
            )
        return [*words, host, *(shlex.quote(word) for word in command)]


def launch_on_hosts(
    hosts: Sequence[Host],
    program: Program,
    *,
    shell: RemoteShell,
    interfaces: str | None,
    start_timeout_s: float,
) -> int:
    """Run a program on several hosts; return the exit status.

    Each host runs one rank per slot, and ranks are numbered in the order of the hosts.  Every host needs this Python
    interpreter and this working directory at the same paths.

    Args:
        interfaces: The network interfaces to use ("eth0,eth1"); with None, each host chooses an interface.
        start_timeout_s: How long the hosts wait for each other at startup, in seconds.

    Returns:
        The exit status of the host that failed first, or 0.

    Raises:
        LaunchError: if the job cannot be started.
    """
    here = [is_this_host(host.name) for host in hosts]
    if here == [True]:
        return run_on_this_host(program, hosts[0].slots, RendezvousConfig(interfaces=interfaces))
    if any(here):
        program.check()
    loopback_only = all(here) and interfaces is None
    addresses = (LOOPBACK,) if loopback_only else tuple(find_interfaces(interfaces).values())
    if not addresses:
        raise LaunchError(
            "this host has no network interface that other hosts can reach over IPv4; configure an interface"
        )
    listener = socket.create_server((LOOPBACK if loopback_only else "", 0))
    with key_for_ranks():
        environment = {name: text for name, text in os.environ.items() if not HOST_VARIABLES.fullmatch(name)}
    nodes = []
    for number, host in enumerate(hosts):
        rendezvous = RendezvousConfig(
            nodes=len(hosts),
            node_rank=number,
            addresses=addresses,
            port=listener.getsockname()[1],
            serves_store=False,
            on_store_host=here[number],
            interfaces=interfaces,
            choose_interface=len(hosts) > 1 and interfaces is None,
            timeout_s=start_timeout_s,
        )
        spec = NodeSpec(host.name, os.getcwd(), environment, program, host.slots, rendezvous)
        nodes.append((spec, _launcher_command(host.name, here[number], shell)))
    return _RemoteJob(nodes, addresses[0], listener, program.verbose).run()


def _launcher_command(host: str, here: bool, shell: RemoteShell) -> list[str]:
    """Return the command that starts a host's launcher, with this Python and this package."""
    package = str(Path(farandole.__file__).parent.parent)
    paths = [package, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != package)]
    command = ["env", f"PYTHONPATH={os.pathsep.join(paths)}", sys.executable, "-m", "farandole.launch.node"]
    return command if here else shell.command_on(host, command)


@dataclass
class _RemoteJob:
    """Starts, monitors and stops the launchers of a job, one per host."""

    nodes: Sequence[tuple[NodeSpec, list[str]]]
    """The spec of each host, and the command that starts its launcher."""
    address: str
    listener: socket.socket
    verbose: bool
    _signals: list[int] = field(default_factory=list)
    _forwarded: int = 0
    _launchers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self) -> int:
        with restored_handlers():
            for number in signals_to_handle():
                signal.signal(number, self._on_signal)
            try:
                self._start()
                return self._report(self._monitor())
            finally:
                for launcher in self._launchers.values():
                    _end(launcher)

    def _start(self) -> None:
        for spec, command in self.nodes:
            if self.verbose:
                notify(f"{spec.host}: {count(spec.ranks, 'rank')}, started by {shlex.join(command)}")
            try:
                # In a separate session, because Ctrl-C in the terminal is forwarded and must not arrive twice.
                launcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                raise LaunchError(
                    f"cannot run {command[0]!r} to reach {spec.host}: {error.strerror}; install it, or choose another "
                    f"command with --remote-shell"
                ) from error
            self._launchers[spec.host] = launcher
            _write(launcher, spec.dump())

    def _monitor(self) -> tuple[str, int] | None:
        """Wait until all launchers have ended; return the host that failed first and its exit status, or None."""
        # importing torch takes seconds; the other launchers import it at the same time
        import torch.distributed as dist

        from farandole.launch.rendezvous import FAILED

        store = dist.TCPStore(
            self.address,
            self.listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self.listener.detach(),
        )
        first_failure: tuple[str, int] | None = None
        give_up_at: float | None = None
        while running := [launcher for launcher in self._launchers.values() if launcher.poll() is None]:
            self._forward_signals(running)
            if first_failure is None and (first_failure := self._find_failure()) is not None:
                give_up_at = time.monotonic() + STOP_TIMEOUT_S
                if not self._signals and not store.check([FAILED]):
                    store.set(FAILED, _explain(*first_failure))
            if give_up_at is not None and not self._signals and time.monotonic() > give_up_at:
                for launcher in running:
                    _end(launcher)
            time.sleep(0.05)
        return first_failure or self._find_failure()

    def _find_failure(self) -> tuple[str, int] | None:
        return next(
            ((host, node.returncode) for host, node in self._launchers.items() if node.returncode), None
        )

    def _report(self, first_failure: tuple[str, int] | None) -> int:
        """Print how the job ended, unless it succeeded; return the exit status."""
        if self._signals:
            notify(describe_stop(self._signals[0], ()))
            return 128 + self._signals[0]
        if first_failure is None:
            return 0
        host, status = first_failure
        notify(_explain(host, status))
        return 128 - status if status < 0 else status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _forward_signals(self, running: Sequence[subprocess.Popen[bytes]]) -> None:
        """Forward the first signal; after the second signal, end the launchers by closing their input."""
        if len(self._signals) == self._forwarded:
            return
        for launcher in running:
            if self._forwarded == 0:
                _write(launcher, str(int(self._signals[0])))
            else:
                _close(launcher)
        self._forwarded = len(self._signals)


def _explain(host: str, status: int) -> str:
    if status == 255:  # ssh could not connect
        return f"the remote shell could not connect to {host}, or lost the connection (exit status {status})"
    if status == 127:  # `env` did not find the interpreter
        return f"{host} has no {sys.executable}; install the same Python at the same path on all hosts"
    if status < 0:
        return f"the launcher on {host} was killed by {signal.Signals(-status).name}"
    return f"the job ended on {host} with exit status {status}"


def _write(launcher: subprocess.Popen[bytes], line: str) -> None:
    assert launcher.stdin is not None  # for the type checker: it is a pipe
    with contextlib.suppress(BrokenPipeError):  # the launcher has ended; `_monitor` detects this
        launcher.stdin.write(line.encode() + b"\n")
        launcher.stdin.flush()


def _close(launcher: subprocess.Popen[bytes]) -> None:
    assert launcher.stdin is not None  # for the type checker: it is a pipe
    with contextlib.suppress(BrokenPipeError):  # the launcher has ended; `_monitor` detects this
        launcher.stdin.close()


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End a launcher by closing its input; kill the launcher if it does not end in time."""
    _close(launcher)
    try:
        launcher.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
