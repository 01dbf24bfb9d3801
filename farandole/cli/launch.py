"""`farandole launch`: run a program of one's own in several ranks."""

from __future__ import annotations

from typing import Annotated

import typer


def launch(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="What follows is the program's own.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Processes on this host.")] = 2,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin/--no-pin", help="Keep each rank to cores of its own.")] = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each rank.", show_default="cores divided by ranks")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts of the job; launch on each of them.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of the hosts this is, from 0.")] = 0,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where the hosts meet: a free port of the first.", show_default=False
        ),
    ] = None,
) -> None:
    """Run a Python program in several processes, the ranks of one job.

    The program joins the others with farandole.init(), or as any program for torchrun does.  Output passes
    through as it is.  If a rank fails the others are stopped, and the reason is shown once.  Ctrl-C asks the
    ranks to stop; a second one kills them.

    \b
      farandole launch --ranks 2 train.py --lr 0.1    --lr is the program's
      farandole launch -n 4 -m my.package.train       a module
      farandole launch -n 2 --threads 8 train.py      8 threads in each rank

    On two hosts, the same on both but for --node-rank:

    \b
      farandole launch -n 8 --nodes 2 --node-rank 0 \\
          --rendezvous node0:29500 train.py
    """
    from farandole.launch import local
    from farandole.launch.placement import LaunchError

    try:
        status = local.launch(
            target,
            arguments or [],
            ranks=ranks,
            module=module,
            pin=pin,
            threads=threads,
            nodes=nodes,
            node_rank=node_rank,
            rendezvous=rendezvous,
        )
    except LaunchError as error:
        typer.echo(f"farandole launch: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)
