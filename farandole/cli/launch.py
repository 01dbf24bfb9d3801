"""The command `farandole launch`: run any Python program on several ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole._autoload import REPLACE_GLOO
from farandole.cli.launcher_options import ALTERNATIVES, FIXED
from farandole.cli.mistakes import Command

if TYPE_CHECKING:
    from farandole.launch.hosts import Host
    from farandole.launch.program import Kind

RANK_OPTIONS = ("--ranks", "-n", "-np", "--num-proc")


class LaunchCommand(Command):
    """The command `farandole launch`.

    For unsupported options of horovodrun and torchrun, error messages suggest alternatives.
    """

    elsewhere = ALTERNATIVES


def _reject(param: typer.CallbackParam, given: bool) -> None:
    """Raise BadParameter, which suggests an alternative, if the user passed the horovodrun option `param`."""
    # -cb and -prefix-timestamp are declared only to be rejected; otherwise, they would be parsed as several
    # single-letter options
    if given:
        raise typer.BadParameter(f"not supported: {ALTERNATIVES[param.opts[0]]}")


def _nodes(text: str | int) -> int:
    """Parse the value of --nodes: a number N, or a range N:N as in torchrun."""
    if isinstance(text, str) and ":" in text:
        low, _, high = text.partition(":")
        if low != high:
            raise typer.BadParameter(f"{text}: {FIXED}")
        text = low
    if not str(text).isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"expected the number of hosts to be an integer of at least 1, got {text!r}")
    return int(text)


def launch(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file or, with -m, a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments for the program.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            *RANK_OPTIONS,
            min=1,
            show_default="one per accelerator, else one per core; with --hosts, all slots",
            help="Number of processes in the whole job.",
        ),
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="auto|gpu|cpu|N",
            show_default=False,
            help="Number of processes on this host, as in torchrun.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="Treat SCRIPT as a module, as in python -m.")
    ] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="Treat SCRIPT as a command, and do not run it with Python.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How many times to restart all ranks after a failure (one host only).")
    ] = 0,
    pin: Annotated[bool, typer.Option("--pin/--no-pin", help="Pin each rank to its own cores.")] = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per rank.", show_default="cores divided by ranks")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output-filename",
            metavar="DIR",
            show_default=False,
            help="Write rank N's output to DIR/rank.N/stdout and stderr.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print the processes that the launcher starts.")
    ] = False,
    replace_gloo: Annotated[
        bool,
        typer.Option(
            "--replace-gloo",
            help="Use farandole in place of Gloo, for Accelerate, Lightning and other tools.",
        ),
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            "-H",
            metavar="HOST:SLOTS,...",
            show_default=False,
            help="Start the ranks on these hosts from this host.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            "--hostfile",
            "-hostfile",
            metavar="FILE",
            show_default=False,
            help="Read the hosts from a file with lines such as: node0 slots=4",
        ),
    ] = None,
    remote_shell: Annotated[
        str,
        typer.Option(
            envvar="FARANDOLE_REMOTE_SHELL",
            metavar="COMMAND",
            help="The program that runs commands on other hosts, such as ssh.",
        ),
    ] = "ssh",
    ssh_port: Annotated[
        int | None, typer.Option("--ssh-port", "-p", min=1, max=65535, help="Port for ssh -p.")
    ] = None,
    ssh_identity_file: Annotated[
        Path | None,
        typer.Option(
            "--ssh-identity-file", "-i", metavar="FILE", show_default=False, help="Identity file for ssh -i."
        ),
    ] = None,
    network_interface: Annotated[
        list[str] | None,
        typer.Option(
            "--network-interface",
            "--network-interfaces",
            "--nics",
            metavar="NAME,...",
            show_default=False,
            help="The network interfaces to use between hosts.  The option can be repeated.",
        ),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=0.1, help="How long hosts wait for each other at the start, in seconds.")
    ] = 600.0,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            "--nnodes",
            metavar="N",
            parser=_nodes,
            help="Number of hosts; run this command on each.",
        ),
    ] = 1,
    node_rank: Annotated[
        int | None, typer.Option(min=0, show_default="0", help="The index of this host, starting from 0.")
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            "--rendezvous",
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="The rendezvous address: the first host and a free port on that host.",
            show_default=False,
        ),
    ] = None,
    rdzv_backend: Annotated[
        str | None,
        typer.Option(
            metavar="c10d|static",
            show_default=False,
            help="torchrun's rendezvous backend; both values use --rendezvous.",
        ),
    ] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Start a job on this host only (the default).")
    ] = False,
    master_addr: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            show_default=False,
            help="The host of --rendezvous; with one host, 127.0.0.1 by default.",
        ),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, show_default="29500", help="The port of --rendezvous."),
    ] = None,
    timeline_filename: Annotated[
        str | None,
        typer.Option(metavar="FILE", show_default=False, help="Sets HOROVOD_TIMELINE for the program."),
    ] = None,
    fusion_threshold_mb: Annotated[
        int | None, typer.Option(min=0, help="Sets HOROVOD_FUSION_THRESHOLD, converted to bytes.")
    ] = None,
    cycle_time_ms: Annotated[float | None, typer.Option(min=0, help="Sets HOROVOD_CYCLE_TIME.")] = None,
    timeline_mark_cycles: Annotated[
        bool, typer.Option("--timeline-mark-cycles", help="Sets HOROVOD_TIMELINE_MARK_CYCLES.")
    ] = False,
    cache_capacity: Annotated[int | None, typer.Option(min=0, help="Sets HOROVOD_CACHE_CAPACITY.")] = None,
    no_stall_check: Annotated[
        bool, typer.Option("--no-stall-check", help="Sets HOROVOD_STALL_CHECK_DISABLE.")
    ] = False,
    stall_check_warning_time_seconds: Annotated[
        int | None, typer.Option(min=1, help="Sets HOROVOD_STALL_CHECK_TIME_SECONDS.")
    ] = None,
    stall_check_shutdown_time_seconds: Annotated[
        int | None, typer.Option(min=0, help="Sets HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.")
    ] = None,
    horovod_shim: Annotated[bool, typer.Option("--horovod-shim", hidden=True)] = False,
    check_build: Annotated[bool, typer.Option("-cb", hidden=True, is_eager=True, callback=_reject)] = False,
    prefix_timestamp: Annotated[
        bool, typer.Option("-prefix-timestamp", hidden=True, is_eager=True, callback=_reject)
    ] = False,
) -> None:
    """Run a Python program on several ranks.

    Each rank is a process that runs the program.  The program joins the job with farandole.init(), or in the same way
    as under torchrun.  The launcher passes the ranks' output through.  If a rank fails, the launcher stops the other
    ranks and prints the cause once.  Ctrl-C asks the ranks to stop; a second Ctrl-C kills them.

    The command also accepts the options of torchrun and horovodrun, with hyphens or underscores.  `python` before the
    script is optional.

    \b
      farandole launch --ranks 2 train.py --lr 0.1    --lr belongs to train.py
      farandole launch -n 4 -m my.package.train       a module
      farandole launch -n 2 --threads 8 train.py      8 threads in each rank
      farandole launch -np 8 -H node0:4,node1:4 train.py
                                                      two hosts, over ssh

    Without ssh, run the following command on both hosts, with --node-rank 0 on the first and --node-rank 1 on the
    second:

    \b
      farandole launch -n 8 --nodes 2 --node-rank 0 \\
          --rendezvous node0:29500 train.py

    On an untrusted network, also set FARANDOLE_JOB_KEY to the same secret on both hosts.
    """
    from farandole.launch.hosts import parse_rendezvous
    from farandole.launch.local import run_on_this_host
    from farandole.launch.placement import LaunchError
    from farandole.launch.program import Program, without_python
    from farandole.launch.reports import describe_stop

    _hint(target, arguments or [], ranks)
    _set_variables(
        TIMELINE=timeline_filename,
        TIMELINE_MARK_CYCLES=1 if timeline_mark_cycles else None,
        FUSION_THRESHOLD=None if fusion_threshold_mb is None else fusion_threshold_mb << 20,
        CYCLE_TIME=None if cycle_time_ms is None else f"{cycle_time_ms:g}",
        CACHE_CAPACITY=cache_capacity,
        STALL_CHECK_DISABLE=1 if no_stall_check else None,
        STALL_CHECK_TIME_SECONDS=stall_check_warning_time_seconds,
        STALL_SHUTDOWN_TIME_SECONDS=stall_check_shutdown_time_seconds,
    )
    if replace_gloo:
        os.environ[REPLACE_GLOO] = "1"
    try:
        kind: Kind = "command" if no_python else "module" if module else "script"
        words: Sequence[str] = (target, *(arguments or ()))
        if kind == "script":
            kind, words = without_python(words)
        shim = "farandole.horovod.shim" if horovod_shim else None
        program = Program(words[0], words[1:], kind, pin, threads, output, verbose, max_restarts, shim=shim)
        interfaces = ",".join(network_interface) if network_interface else None
        rendezvous = _rendezvous(rendezvous, master_addr, master_port, nodes)
        if hosts is None and hostfile is None:
            _only_with_hosts(ssh_port=ssh_port, ssh_identity_file=ssh_identity_file)
            _check_torchrun(rdzv_backend, standalone, nodes, node_rank, rendezvous)
            config = parse_rendezvous(nodes, node_rank or 0, rendezvous, start_timeout, interfaces)
            status = run_on_this_host(program, _ranks_here(ranks, nproc_per_node, nodes), config)
        else:
            if nproc_per_node is not None:
                raise LaunchError(
                    "--nproc-per-node is not supported with --hosts; specify each host's slots, as in node0:4,node1:4"
                )
            if nodes > 1 or node_rank or rendezvous is not None or standalone or rdzv_backend is not None:
                raise LaunchError(
                    "--hosts and --hostfile start the launchers on all hosts; omit --nodes, --node-rank, --rendezvous, "
                    "--rdzv-backend and --standalone"
                )
            from farandole.launch.remote import RemoteShell, launch_on_hosts

            status = launch_on_hosts(
                _hosts(hosts, hostfile, ranks),
                program,
                shell=RemoteShell(remote_shell, ssh_port, ssh_identity_file),
                interfaces=interfaces,
                start_timeout_s=start_timeout,
            )
    except LaunchError as error:
        typer.echo(f"farandole launch: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:  # interrupted before any rank started
        typer.echo(describe_stop(signal.SIGINT, ()), err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    raise typer.Exit(status)


def _hosts(hosts: str | None, hostfile: Path | None, ranks: int | None) -> list[Host]:
    """Assign `ranks` ranks to the hosts in --hosts or --hostfile, and return the hosts."""
    from farandole.launch.hosts import assign_ranks, parse_hosts, read_hostfile
    from farandole.launch.placement import LaunchError

    if hosts is not None and hostfile is not None:
        raise LaunchError("--hosts and --hostfile are mutually exclusive; omit one of them")
    found = parse_hosts(hosts) if hosts is not None else read_hostfile(hostfile or Path())
    return assign_ranks(found, ranks)


def _rendezvous(address: str | None, host: str | None, port: int | None, nodes: int) -> str | None:
    """Return the rendezvous address HOST:PORT, or None if no option specifies it."""
    from farandole.launch.hosts import LOOPBACK
    from farandole.launch.placement import LaunchError

    if host is None and port is None:
        return address
    if address is not None or (host is None and nodes > 1):
        raise LaunchError(
            "expected either --rendezvous HOST:PORT, or --master-addr HOST with --master-port PORT"
        )
    return f"{host or LOOPBACK}:{port or 29500}"


def _only_with_hosts(**given: object) -> None:
    """Raise LaunchError if any of these options is given; they require --hosts or --hostfile."""
    from farandole.launch.placement import LaunchError

    for name, value in given.items():
        if value is not None:
            raise LaunchError(
                f"--{name.replace('_', '-')} requires --hosts or --hostfile; name the hosts, or omit this option"
            )


def _check_torchrun(
    backend: str | None, standalone: bool, nodes: int, node_rank: int | None, rendezvous: str | None
) -> None:
    """Raise LaunchError for unsupported combinations of torchrun options."""
    from farandole.launch.placement import LaunchError

    if backend not in (None, "c10d", "static"):
        raise LaunchError(f"--rdzv-backend {backend} is not supported; use c10d or static, or omit it")
    if standalone and (nodes > 1 or node_rank or rendezvous is not None):
        raise LaunchError(
            "--standalone starts a job on this host only and cannot be combined with --nodes, --node-rank or "
            "--rendezvous; omit --standalone, or omit the other options"
        )
    if nodes > 1 and node_rank is None and backend == "c10d":
        raise LaunchError(
            f"--rdzv-backend c10d requires --node-rank on each of the {nodes} hosts, starting from 0"
        )


def _ranks_here(ranks: int | None, per_node: str | None, nodes: int) -> int:
    """Return the number of ranks to start on this host."""
    from farandole.launch.limits import offered_accelerators, offered_ranks
    from farandole.launch.placement import LaunchError

    if per_node is None:
        if ranks is None:
            return offered_ranks()
        if ranks % nodes:
            raise LaunchError(
                f"--ranks {ranks} cannot be divided evenly among --nodes {nodes}; to start different numbers of ranks, "
                f"set --nproc-per-node on each host"
            )
        return ranks // nodes
    if ranks is not None:
        raise LaunchError("--ranks and --nproc-per-node are mutually exclusive; omit one of them")
    if per_node == "auto":
        return offered_ranks()
    if per_node == "cpu":
        return offered_ranks(accelerators=0)
    if per_node == "gpu":
        if count := offered_accelerators():
            return count
        raise LaunchError("--nproc-per-node gpu: this host has no accelerator; try --nproc-per-node cpu")
    if per_node.isdecimal() and int(per_node) > 0:
        return int(per_node)
    raise LaunchError(f"--nproc-per-node {per_node}: expected auto, gpu, cpu or a positive number")


def _hint(target: str, arguments: list[str], ranks: int | None) -> None:
    """Print a note if the program's arguments contain --ranks or a synonym."""
    word = next((word for word in arguments if word.split("=")[0] in RANK_OPTIONS), None)
    if ranks is None and word is not None:
        typer.echo(
            f"{word} follows {target} and is passed to it; to set the number of ranks, put {word} before {target}",
            err=True,
        )


def _set_variables(**values: object) -> None:
    """Set the environment variable HOROVOD_NAME for each argument NAME that is not None."""
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in values.items() if value is not None})
