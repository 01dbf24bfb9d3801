"""`farandole launch`: run any Python program in several ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole._autoload import REPLACE_GLOO
from farandole.cli.mistakes import Command

if TYPE_CHECKING:
    from farandole.launch.hosts import Host
    from farandole.launch.program import Kind

RANK_OPTIONS = ("--ranks", "-n", "-np", "--num-proc")

FIXED = "the ranks of a job are fixed when it starts; torchrun --nnodes MIN:MAX script.py starts elastic jobs"


LOG = "--output-filename DIR writes the output of each rank to files"
TIMEOUT = "--start-timeout is the time that hosts wait for each other, in seconds"
SELECTION = "omit it: --rendezvous or --hosts selects the network between hosts"
TUNED = "set --fusion-threshold-mb and --cycle-time-ms by hand"
HIERARCHICAL = "omit it: the ranks of a host communicate through shared memory"


class LaunchCommand(Command):
    """Refuses options of horovodrun and torchrun without a counterpart, and names the alternative."""

    elsewhere = {
        "--min-np": FIXED,
        "--max-np": FIXED,
        "--min-num-proc": FIXED,
        "--max-num-proc": FIXED,
        "--slots-per-host": FIXED,
        "--reset-limit": "--max-restarts is the number of restarts",
        "--host-discovery-script": f"{FIXED}; --hosts or --hostfile names the hosts",
        "--check-build": "`farandole info` lists what is available",
        "--gloo": "omit it: ranks of one host use shared memory, ranks of several hosts TCP",
        "--mpi": "start the ranks with MPI's own launcher: mpirun -n 4 python script.py",
        "--jsrun": "start the ranks with LSF's own launcher: jsrun -n 4 python script.py",
        "--mpi-args": "start the ranks with MPI's own launcher: mpirun ARGS -n 4 python script.py",
        "--config-file": "write the options on the command line",
        "--log-level": "set the level in the program: logging.getLogger('farandole').setLevel(level)",
        "--prefix-output-with-timestamp": LOG,
        "--autotune": TUNED,
        "--autotune-log-file": TUNED,
        "--hierarchical-allreduce": HIERARCHICAL,
        "--hierarchical-allgather": HIERARCHICAL,
        "--rdzv-id": "omit it: the address of --rendezvous identifies the job",
        "--rdzv-conf": TIMEOUT,
        "--local-addr": SELECTION,
        "--monitor-interval": "omit it: the ranks are checked 20 times a second",
        "--start-method": "omit it: each rank is a new process",
        "--role": "omit it: all ranks of a job have the same role",
        "--log-dir": LOG,
        "--redirects": LOG,
        "--tee": LOG,
        "--local-ranks-filter": LOG,
        "--numa-binding": "--pin, the default, pins each rank to its own cores",
        "--run-path": "omit it: scripts run in the process of the rank",
    }


def _nodes(text: str | int) -> int:
    """Parse the value of --nodes."""
    if isinstance(text, str) and ":" in text:
        low, _, high = text.partition(":")
        if low != high:
            raise typer.BadParameter(f"{text}: {FIXED}")
        text = low
    if not str(text).isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"expected a number of hosts of at least 1, got {text!r}")
    return int(text)


def launch(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the program.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            *RANK_OPTIONS,
            min=1,
            show_default="one per accelerator, else one per core; with --hosts all slots",
            help="Processes of the whole job.",
        ),
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="auto|gpu|cpu|N", show_default=False, help="Processes on this host, as in torchrun."
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="SCRIPT is a command, which is not run by Python.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often all ranks are started again after a failure, on one host.")
    ] = 0,
    pin: Annotated[bool, typer.Option("--pin/--no-pin", help="Pin each rank to its own cores.")] = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each rank.", show_default="cores divided by ranks")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output-filename",
            metavar="DIR",
            show_default=False,
            help="Write the output of rank N to DIR/rank.N/stdout and stderr.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the processes that are started.")] = False,
    replace_gloo: Annotated[
        bool,
        typer.Option(
            "--replace-gloo", help="Use farandole in place of Gloo: for Accelerate, Lightning and others."
        ),
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            "-H",
            metavar="HOST:SLOTS,...",
            show_default=False,
            help="Start the ranks on these hosts, from here.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Read --hosts from a file with lines like: node0 slots=4"
        ),
    ] = None,
    remote_shell: Annotated[
        str,
        typer.Option(
            envvar="FARANDOLE_REMOTE_SHELL", help="The command that runs a command on another host, like ssh."
        ),
    ] = "ssh",
    ssh_port: Annotated[
        int | None, typer.Option("--ssh-port", "-p", min=1, max=65535, help="For ssh -p.")
    ] = None,
    ssh_identity_file: Annotated[
        Path | None,
        typer.Option("--ssh-identity-file", "-i", metavar="FILE", show_default=False, help="For ssh -i."),
    ] = None,
    network_interface: Annotated[
        str | None,
        typer.Option(
            "--network-interface",
            "--network-interfaces",
            "--nics",
            metavar="NAME,...",
            show_default=False,
            help="The network interfaces between hosts.",
        ),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that hosts wait for each other at the start.")
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
        int | None, typer.Option(min=0, show_default="0", help="The number of this host, from 0.")
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            "--rendezvous",
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Where the hosts rendezvous: a free port of the first.",
            show_default=False,
        ),
    ] = None,
    rdzv_backend: Annotated[
        str | None, typer.Option(metavar="c10d|static", show_default=False, help="Accepted for torchrun.")
    ] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Start a job on this host alone, the default.")
    ] = False,
    master_addr: Annotated[
        str | None, typer.Option(metavar="HOST", show_default=False, help="The host of --rendezvous.")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, show_default="29500", help="The port of --rendezvous, with --master-addr."
        ),
    ] = None,
    timeline_filename: Annotated[
        str | None,
        typer.Option(metavar="FILE", show_default=False, help="Sets HOROVOD_TIMELINE for the program."),
    ] = None,
    fusion_threshold_mb: Annotated[
        int | None, typer.Option(min=0, help="Sets HOROVOD_FUSION_THRESHOLD, in bytes.")
    ] = None,
    cycle_time_ms: Annotated[float | None, typer.Option(min=0, help="Sets HOROVOD_CYCLE_TIME.")] = None,
    timeline_mark_cycles: Annotated[
        bool, typer.Option("--timeline-mark-cycles", help="Sets HOROVOD_TIMELINE_MARK_CYCLES.")
    ] = False,
    cache_capacity: Annotated[int | None, typer.Option(min=0, help="Sets HOROVOD_CACHE_CAPACITY.")] = None,
    disable_cache: Annotated[
        bool, typer.Option("--disable-cache", help="Sets HOROVOD_CACHE_CAPACITY to 0.")
    ] = False,
    no_stall_check: Annotated[
        bool, typer.Option("--no-stall-check", help="Sets HOROVOD_STALL_CHECK_DISABLE.")
    ] = False,
    stall_check_warning_time_seconds: Annotated[
        int | None, typer.Option(min=1, help="Sets HOROVOD_STALL_CHECK_TIME_SECONDS.")
    ] = None,
    stall_check_shutdown_time_seconds: Annotated[
        int | None, typer.Option(min=0, help="Sets HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.")
    ] = None,
) -> None:
    """Run a Python program in several processes, the ranks of one job.

    The program joins the job with farandole.init(), or as any program for torchrun does.  The output of the
    ranks passes through.  If a rank fails the others are stopped, and the cause is printed once.  Ctrl-C asks the
    ranks to stop; a second Ctrl-C kills them.

    The options of torchrun and horovodrun are accepted too, with hyphens or underscores.  `python` before the
    script may be written or omitted.

    \b
      farandole launch --ranks 2 train.py --lr 0.1    --lr belongs to train.py
      farandole launch -n 4 -m my.package.train       a module
      farandole launch -n 2 --threads 8 train.py      8 threads in each rank
      farandole launch -np 8 -H node0:4,node1:4 train.py
                                                      two hosts, over ssh

    Or without ssh, on both hosts, with --node-rank 0 and --node-rank 1:

    \b
      farandole launch -n 8 --nodes 2 --node-rank 0 \\
          --rendezvous node0:29500 train.py

    On a network that you do not trust, also set FARANDOLE_JOB_KEY to the same secret on both hosts.
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
        CACHE_CAPACITY=0 if disable_cache else cache_capacity,
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
        program = Program(words[0], words[1:], kind, pin, threads, output, verbose, max_restarts)
        if master_addr is not None or master_port is not None:
            if rendezvous is not None or master_addr is None:
                raise LaunchError(
                    "pass --rendezvous HOST:PORT, or --master-addr HOST with --master-port PORT"
                )
            rendezvous = f"{master_addr}:{master_port or 29500}"
        if hosts is None and hostfile is None:
            _only_with_hosts(ssh_port=ssh_port, ssh_identity_file=ssh_identity_file)
            _check_torchrun(rdzv_backend, standalone, nodes, node_rank, rendezvous)
            config = parse_rendezvous(nodes, node_rank or 0, rendezvous, start_timeout, network_interface)
            status = run_on_this_host(program, _ranks_here(ranks, nproc_per_node, nodes), config)
        else:
            if nproc_per_node is not None:
                raise LaunchError(
                    "--nproc-per-node cannot be combined with --hosts; specify each host's slots instead, "
                    "as in node0:4,node1:4"
                )
            if nodes > 1 or node_rank or rendezvous is not None or standalone or rdzv_backend is not None:
                raise LaunchError(
                    "--hosts starts the launchers on all hosts; --nodes, --node-rank, --rendezvous, "
                    "--rdzv-backend and --standalone are for launchers that you start on each host"
                )
            from farandole.launch.remote import RemoteShell, launch_on_hosts

            status = launch_on_hosts(
                _hosts(hosts, hostfile, ranks),
                program,
                shell=RemoteShell(remote_shell, ssh_port, ssh_identity_file),
                interfaces=network_interface,
                start_timeout_s=start_timeout,
            )
    except LaunchError as error:
        typer.echo(f"farandole launch: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:  # before a rank was started
        typer.echo(describe_stop(signal.SIGINT, ()), err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    raise typer.Exit(status)


def _hosts(hosts: str | None, hostfile: Path | None, ranks: int | None) -> list[Host]:
    """Return the hosts of the job with their ranks, from --hosts or --hostfile."""
    from farandole.launch.hosts import assign_ranks, parse_hosts, read_hostfile
    from farandole.launch.placement import LaunchError

    if hosts is not None and hostfile is not None:
        raise LaunchError("--hosts and --hostfile are mutually exclusive")
    found = parse_hosts(hosts) if hosts is not None else read_hostfile(hostfile or Path())
    return assign_ranks(found, ranks)


def _only_with_hosts(**given: object) -> None:
    """Refuse options that have no effect on this host alone."""
    from farandole.launch.placement import LaunchError

    for name, value in given.items():
        if value is not None:
            raise LaunchError(
                f"--{name.replace('_', '-')} requires --hosts or --hostfile; add one of them, or omit this option"
            )


def _check_torchrun(
    backend: str | None, standalone: bool, nodes: int, node_rank: int | None, rendezvous: str | None
) -> None:
    """Refuse combinations of torchrun's options that start no job here."""
    from farandole.launch.placement import LaunchError

    if backend not in (None, "c10d", "static"):
        raise LaunchError(
            f"--rdzv-backend {backend}: expected c10d or static; farandole needs no other service"
        )
    if standalone and (nodes > 1 or node_rank or rendezvous is not None):
        raise LaunchError(
            "--standalone starts a job on this host only; omit it, or omit --nodes, --node-rank and --rendezvous"
        )
    if nodes > 1 and node_rank is None and backend == "c10d":
        raise LaunchError(f"--rdzv-backend c10d requires --node-rank on each of the {nodes} hosts, from 0")


def _ranks_here(ranks: int | None, per_node: str | None, nodes: int) -> int:
    """Return the number of ranks on this host, from --ranks or --nproc-per-node, else what the machine offers."""
    from farandole.launch.limits import offered_accelerators, offered_ranks
    from farandole.launch.placement import LaunchError

    if per_node is None:
        if ranks is None:
            return offered_ranks()
        if ranks % nodes:
            raise LaunchError(
                f"--ranks {ranks} is not a multiple of --nodes {nodes}; for different numbers of ranks, "
                "pass --nproc-per-node on each host"
            )
        return ranks // nodes
    if ranks is not None:
        raise LaunchError("--ranks and --nproc-per-node are mutually exclusive")
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
    raise LaunchError(f"--nproc-per-node {per_node}: expected auto, gpu, cpu or a number from 1")


def _hint(target: str, arguments: list[str], ranks: int | None) -> None:
    """Print a note if --ranks follows the script, so that the script gets it."""
    word = next((word for word in arguments if word.split("=")[0] in RANK_OPTIONS), None)
    if ranks is None and word is not None:
        typer.echo(
            f"{word} follows {target} and is passed to it; put {word} before {target} to set the ranks",
            err=True,
        )


def _set_variables(**values: object) -> None:
    """Set the variables HOROVOD_NAME of horovodrun's options for the program."""
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in values.items() if value is not None})
