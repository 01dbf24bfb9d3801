"""`farandole launch`: run any Python program in several ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.mistakes import Command

if TYPE_CHECKING:
    from farandole.launch.hosts import Host
    from farandole.launch.program import Program

RANKS = 2
"""The default number of ranks of a job on one host."""

RANK_OPTIONS = ("--ranks", "-n", "-np", "--num-proc")

FIXED = "the ranks of a job are fixed when it starts; torchrun --nnodes MIN:MAX script.py starts elastic jobs"


class LaunchCommand(Command):
    """Refuses options of horovodrun and torchrun without a counterpart, and names the alternative."""

    elsewhere = {
        "--min-np": FIXED,
        "--max-np": FIXED,
        "--host-discovery-script": f"{FIXED}; --hosts or --hostfile names the hosts",
        "--check-build": "`farandole info` lists what is available",
        "--gloo": "omit it: ranks of one host use shared memory, ranks of several hosts TCP",
        "--mpi": "start the ranks with MPI's own launcher: mpirun -n 4 python script.py",
        "--nproc-per-node": "--ranks is the number of processes on this host",
        "--nproc_per_node": "--ranks is the number of processes on this host",
        "--nnodes": "--nodes is the number of hosts",
        "--master-addr": "--rendezvous HOST:PORT is where the hosts rendezvous",
        "--master-port": "--rendezvous HOST:PORT is where the hosts rendezvous",
    }


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
            show_default=f"{RANKS}, or with --hosts all slots",
            help="Processes on this host; with --hosts, of the whole job.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
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
    ssh_port: Annotated[int | None, typer.Option(min=1, max=65535, help="For ssh -p.")] = None,
    ssh_identity_file: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="For ssh -i.")
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
    nodes: Annotated[int, typer.Option(min=1, help="Number of hosts; run this command on each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="The number of this host, from 0.")] = 0,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the hosts rendezvous: a free port of the first.",
            show_default=False,
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
) -> None:
    """Run a Python program in several processes, the ranks of one job.

    The program joins the job with farandole.init(), or as any program for torchrun does.  The output of the
    ranks passes through.  If a rank fails the others are stopped, and the cause is printed once.  Ctrl-C asks the
    ranks to stop; a second Ctrl-C kills them.

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
    from farandole.launch.program import Program
    from farandole.launch.reports import describe_stop

    program = Program(target, tuple(arguments or ()), module, pin, threads, output, verbose)
    _hint(program, ranks)
    _set_variables(timeline_filename, fusion_threshold_mb, cycle_time_ms)
    try:
        if hosts is None and hostfile is None:
            _only_with_hosts(ssh_port=ssh_port, ssh_identity_file=ssh_identity_file)
            config = parse_rendezvous(nodes, node_rank, rendezvous, start_timeout, network_interface)
            status = run_on_this_host(program, ranks or RANKS, config)
        else:
            if nodes > 1 or node_rank > 0 or rendezvous is not None:
                raise LaunchError(
                    "--hosts starts the launchers of all hosts; --nodes, --node-rank and --rendezvous are for "
                    "launchers that you start on each host"
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
                f"--{name.replace('_', '-')} is for the hosts of --hosts or --hostfile; name hosts, or omit it"
            )


def _hint(program: Program, ranks: int | None) -> None:
    """Print a note if --ranks follows the script, so that the script gets it."""
    word = next((word for word in program.arguments if word.split("=")[0] in RANK_OPTIONS), None)
    if ranks is None and word is not None:
        typer.echo(
            f"{word} follows {program.target} and is passed to it; put {word} before {program.target} to set the ranks",
            err=True,
        )


def _set_variables(timeline: str | None, fusion_mb: int | None, cycle_ms: float | None) -> None:
    """Set the environment variables of horovodrun's options for the program."""
    variables = {
        "HOROVOD_TIMELINE": timeline,
        "HOROVOD_FUSION_THRESHOLD": None if fusion_mb is None else str(fusion_mb << 20),
        "HOROVOD_CYCLE_TIME": None if cycle_ms is None else f"{cycle_ms:g}",
    }
    os.environ.update({name: text for name, text in variables.items() if text is not None})
