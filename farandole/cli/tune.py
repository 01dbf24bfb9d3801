"""`farandole tune`: which all-reduce algorithm is fastest between these hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.bench import OFFERED, default_ranks, launched_ranks, run_or_refuse

if TYPE_CHECKING:
    from farandole.launch.placement import Placement


def tune(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Processes of the job.", show_default=OFFERED),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the table to FILE.", show_default=False),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Name of the link in the table, such as '25 Gbit/s Ethernet'.", show_default=False),
    ] = None,
    least: Annotated[str, typer.Option("--min", metavar="BYTES", help="Smallest size: 64, 1K, 4M.")] = "64",
    most: Annotated[
        str, typer.Option("--max", metavar="BYTES", help="Largest size; each size is 4 times the one before.")
    ] = "16M",
    turns: Annotated[
        int, typer.Option(help="Measurements of each algorithm, of which the minimum counts.")
    ] = 9,
) -> None:
    """Measure the all-reduce algorithms between hosts: ring, doubling, rabenseifner, and the number of leaders.

    Run it in a job on the hosts to measure.  Outside a job, it starts ranks on this host, each of which stands for a
    host.  Use the table with farandole.comm.Options(table="tuned.json").

    \b
    On two hosts:
      farandole launch --hosts node0:4,node1:4 -m farandole tune --output tuned.json

    \b
    To see how it works:
      farandole tune -n 4
    """
    from farandole.bench.collectives_setup import parse_size
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
