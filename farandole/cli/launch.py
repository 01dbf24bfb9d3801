"""`farandole launch`: run a program of one's own in several ranks."""

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
"""How many ranks a job has on one host, where nobody says."""

RANK_OPTIONS = ("--ranks", "-n", "-np", "--num-proc")

FIXED = "the ranks of a job are fixed when it starts; torchrun --nnodes MIN:MAX script.py starts elastic jobs"


class LaunchCommand(Command):
    """Options of horovodrun and of torchrun that have no counterpart are refused with what to use instead."""

    elsewhere = {
        "--min-np": FIXED,
        "--max-np": FIXED,
        "--host-discovery-script": f"{FIXED}; --hosts or --hostfile names the hosts",
        "--check-build": "`farandole info` says what there is",
        "--gloo": "leave it away: ranks on several hosts use Gloo, those on one host shared memory",
        "--mpi": "start the ranks with MPI's own launcher: mpirun -n 4 python script.py",
        "--nproc-per-node": "--ranks says how many processes this host gets",
        "--nproc_per_node": "--ranks says how many processes this host gets",
        "--nnodes": "--nodes says how many hosts there are",
        "--master-addr": "--rendezvous HOST:PORT says where the hosts meet",
        "--master-port": "--rendezvous HOST:PORT says where the hosts meet",
    }


def launch(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="What follows is the program's own.")
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
    pin: Annotated[bool, typer.Option("--pin/--no-pin", help="Keep each rank to cores of its own.")] = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each rank.", show_default="cores divided by ranks")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output-filename",
            metavar="DIR",
            show_default=False,
            help="Let ranks print to DIR/rank.N/stdout and stderr.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what is started where.")] = False,
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
            metavar="FILE", show_default=False, help="The same from a file, with lines like: node0 slots=4"
        ),
    ] = None,
    remote_shell: Annotated[
        str,
        typer.Option(envvar="FARANDOLE_REMOTE_SHELL", help="What reaches other hosts: COMMAND HOST WORDS."),
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
            help="What hosts use to speak to each other.",
        ),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that hosts wait for each other at the start.")
    ] = 600.0,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts of the job; launch on each of them.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of the hosts this is, from 0.")] = 0,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where the hosts meet: a free port of the first.", show_default=False
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

    The program joins the others with farandole.init(), or as any program for torchrun does.  Output passes
    through as it is.  If a rank fails the others are stopped, and the reason is shown once.  Ctrl-C asks the
    ranks to stop; a second one kills them.

    \b
      farandole launch --ranks 2 train.py --lr 0.1    --lr is the program's
      farandole launch -n 4 -m my.package.train       a module
      farandole launch -n 2 --threads 8 train.py      8 threads in each rank
      farandole launch -np 8 -H node0:4,node1:4 train.py
                                                      two hosts, over ssh

    Or without ssh, the same on both hosts but for --node-rank:

    \b
      farandole launch -n 8 --nodes 2 --node-rank 0 \\
          --rendezvous node0:29500 train.py
    """
    from farandole.launch.placement import LaunchError
    from farandole.launch.program import Program
    from farandole.launch.reports import stopped_by

    program = Program(target, tuple(arguments or ()), module, pin, threads, output, verbose)
    _hint(program, ranks)
    _set_variables(timeline_filename, fusion_threshold_mb, cycle_time_ms)
    try:
        if hosts is None and hostfile is None:
            _only_with_hosts(ssh_port=ssh_port, ssh_identity_file=ssh_identity_file)
            status = _launch_here(
                program, ranks or RANKS, nodes, node_rank, rendezvous, start_timeout, network_interface
            )
        else:
            if nodes > 1 or node_rank > 0 or rendezvous is not None:
                raise LaunchError(
                    "--hosts starts the launchers of all hosts; --nodes, --node-rank and --rendezvous are for "
                    "those that are started by hand"
                )
            from farandole.launch.remote import RemoteShell, launch_on

            status = launch_on(
                _hosts(hosts, hostfile, ranks),
                program,
                shell=RemoteShell(remote_shell, ssh_port, ssh_identity_file),
                interfaces=network_interface,
                start_timeout_s=start_timeout,
            )
    except LaunchError as error:
        typer.echo(f"farandole launch: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:  # before there was a rank to stop
        typer.echo(stopped_by(signal.SIGINT, ()), err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    raise typer.Exit(status)


def _launch_here(
    program: Program,
    ranks: int,
    nodes: int,
    node_rank: int,
    rendezvous: str | None,
    start_timeout_s: float,
    interfaces: str | None,
) -> int:
    from farandole.launch.gathering import gather_by_hand
    from farandole.launch.interfaces import chosen, use
    from farandole.launch.local import run_here

    gathering = gather_by_hand(nodes, node_rank, rendezvous, start_timeout_s)
    if interfaces is not None:
        use(",".join(chosen(interfaces)))
    return run_here(program, ranks, gathering)


def _hosts(hosts: str | None, hostfile: Path | None, ranks: int | None) -> list[Host]:
    """The hosts of the job and the ranks of each, from --hosts or --hostfile."""
    from farandole.launch.hosts import parse_hosts, read_hostfile, spread
    from farandole.launch.placement import LaunchError

    if hosts is not None and hostfile is not None:
        raise LaunchError("--hosts and --hostfile name the hosts, each alone; leave one away")
    found = parse_hosts(hosts) if hosts is not None else read_hostfile(hostfile or Path())
    return spread(found, ranks)


def _only_with_hosts(**given: object) -> None:
    """Refuse what would be ignored on this host alone."""
    from farandole.launch.placement import LaunchError

    for name, value in given.items():
        if value is not None:
            raise LaunchError(
                f"--{name.replace('_', '-')} is for the hosts of --hosts or --hostfile; none is named"
            )


def _hint(program: Program, ranks: int | None) -> None:
    """Say that --ranks after the script is the script's, where it may have been meant for us."""
    word = next((word for word in program.arguments if word.split("=")[0] in RANK_OPTIONS), None)
    if ranks is None and word is not None:
        typer.echo(
            f"{word} stands after {program.target} and is passed to it; before it, it would be ours", err=True
        )


def _set_variables(timeline: str | None, fusion_mb: int | None, cycle_ms: float | None) -> None:
    """What horovodrun's options are to programs: environment variables."""
    variables = {
        "HOROVOD_TIMELINE": timeline,
        "HOROVOD_FUSION_THRESHOLD": None if fusion_mb is None else str(fusion_mb << 20),
        "HOROVOD_CYCLE_TIME": None if cycle_ms is None else f"{cycle_ms:g}",
    }
    os.environ.update({name: text for name, text in variables.items() if text is not None})
