"""The command `farandole tune`: find the fastest all-reduce algorithm between hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.bench import OFFERED, default_ranks, launched_ranks, run_or_refuse

if TYPE_CHECKING:
    from farandole.launch.placement import Placement


def tune(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Number of processes in the job.", show_default=OFFERED),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the table to FILE.", show_default=False),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Link name in the table, such as '25 Gbit/s Ethernet'.", show_default=False),
    ] = None,
    least: Annotated[
        str, typer.Option("--min", metavar="BYTES", help="Smallest message size, such as 64, 1K or 4M.")
    ] = "64",
    most: Annotated[
        str,
        typer.Option("--max", metavar="BYTES", help="Largest message size.  Sizes quadruple at each step."),
    ] = "16M",
    turns: Annotated[int, typer.Option(help="Measurements per algorithm, of which the fastest counts.")] = 9,
) -> None:
    """Find the fastest all-reduce algorithms between hosts.

    For each message size, the command finds the fastest all-reduce algorithm and the best number of leaders.  The
    algorithms are ring, doubling and rabenseifner.  Run the command in a job on the hosts that you want to measure.
    Outside a job, the command starts ranks on this host, each of which represents a host.

    With --output, the command writes the results to a file.  A program uses the file with
    farandole.comm.Options(table="tuned.json").

    \b
    On two hosts:
      farandole launch --hosts node0:4,node1:4 -m farandole tune --output tuned.json

    \b
    To try the command on one host:
      farandole tune -n 4
    """
    from farandole.bench.collectives.setup import parse_size
    from farandole.bench.tune import TuneSetup, check_ranks, run
    from farandole.launch.local import launch

    def measure(placement: Placement) -> int:
        least_bytes, most_bytes = parse_size("--min", least), parse_size("--max", most)
        setup = TuneSetup(least_bytes, most_bytes, turns, link, output)
        launched = launched_ranks(ranks, placement)
        setup.check()
        if launched is None:
            check_ranks(ranks or default_ranks())
            return launch("farandole.bench.tune", [setup.dump()], ranks=ranks or default_ranks(), module=True)
        run(setup)
        return 0

    run_or_refuse("tune", measure)
