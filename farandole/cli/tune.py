"""`farandole tune`: which all-reduce algorithm is fastest between these hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.bench import DEFAULT_RANKS, ranks_there, run_or_refuse

if TYPE_CHECKING:
    from farandole.launch.placement import Placement


def tune(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Processes on this host.", show_default=str(DEFAULT_RANKS)),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the table there.", show_default=False),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="What the table calls the link, as in '25 Gbit/s Ethernet'.", show_default=False),
    ] = None,
    least: Annotated[str, typer.Option("--min", metavar="BYTES", help="The first size: 64, 1K, 4M.")] = "64",
    most: Annotated[
        str, typer.Option("--max", metavar="BYTES", help="Sizes grow fourfold up to here.")
    ] = "16M",
    turns: Annotated[int, typer.Option(help="Figures of each, of which the least counts.")] = 9,
) -> None:
    """Measure the all-reduce algorithms between hosts: ring, doubling, rabenseifner, and how many ranks lead.

    Takes part in the job in which it is started; alone, it starts ranks on this host, which then stand for hosts.
    The table is for farandole.comm.Options(table="tuned.json").

    \b
    On each of two hosts, but for --node-rank:
      farandole launch -n 4 --nodes 2 --node-rank 0 \\
          --rendezvous node0:29500 -m farandole tune --output tuned.json

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
        there = ranks_there(ranks, placement)
        setup.check()
        if there is None:
            check_ranks(ranks or DEFAULT_RANKS)
            return launch("farandole.bench.tune", [setup.dump()], ranks=ranks or DEFAULT_RANKS, module=True)
        run(setup)
        return 0

    run_or_refuse("tune", measure)
