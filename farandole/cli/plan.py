"""`farandole plan`: whether a training fits, and how fast it will be, before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from farandole.bench.planning import Planned, PlanSetup

DEFAULT_RANKS = 2


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRESET] [KEY=VALUE]...",
            help="What to train, as farandole train takes it: a preset or TOML file, and changes to it.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", "-n", min=1, help="Devices that share the work.")
    ] = DEFAULT_RANKS,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts that the ranks are on.")] = 1,
    memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Memory of each rank: 16GiB.", show_default="what is free here"),
    ] = None,
    zero: Annotated[
        list[int] | None, typer.Option(help="Stages of ZeRO to consider.  Repeatable.", show_default="all")
    ] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(help="none, block, selective or attention.  Repeatable.", show_default="all"),
    ] = None,
    offload: Annotated[
        list[str] | None,
        typer.Option(
            help="States of the optimizer: none, host or disk:FOLDER.  Repeatable.",
            show_default="none; if nothing fits, all",
        ),
    ] = None,
    offloaded: Annotated[
        list[str] | None,
        typer.Option(
            help="What goes there: optimizer, gradients or parameters too.  Repeatable.",
            show_default="optimizer; if nothing fits, all",
        ),
    ] = None,
    swap: Annotated[
        list[str] | None,
        typer.Option(
            help="Activations: none, host (accelerators) or disk:FOLDER.  Repeatable.",
            show_default="none; if nothing fits, both",
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="fp32, bf16 or fp16.  Repeatable.", show_default="as configured"),
    ] = None,
    rounding: Annotated[
        list[str] | None,
        typer.Option(
            help="Of bf16 weights: nearest or stochastic.  Repeatable.",
            show_default="nearest; if nothing fits, both",
        ),
    ] = None,
    hybrid: Annotated[
        bool | None,
        typer.Option(
            "--hybrid/--no-hybrid",
            help="Whether each host has a copy of what ZeRO divides.",
            show_default="both, if there are several hosts",
        ),
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(metavar="N", help="FLOP/s of each rank: 50G, 300T.", show_default="measured"),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="N", help="Bytes/s between ranks: 12G.", show_default="measured"),
    ] = None,
    accelerators: Annotated[
        bool,
        typer.Option(
            "--accelerators", help="Plan for such, which are not here, with the three options above."
        ),
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Run the first plan on real ranks, and compare.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, help="Steps of --check.")] = 3,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the plans there.", show_default=False)
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also draw them: .png, .pdf or .svg.", show_default=False),
    ] = None,
) -> None:
    """Predict the memory and the seconds per step of every plan for a training, the fastest that fits first.

    Nothing is trained.  The machine is measured once, in seconds; what you give is not.  Ends with status 1 where
    no plan fits, or where --check finds a peak that was not predicted to 10 %.

    \b
      farandole plan                                    the main job, on 2 ranks of this machine
      farandole plan gpt2-small -n 8 --memory 16GiB --picture plans.png
      farandole plan my.toml micro_batch=8 --zero 2 --precision fp32 --precision bf16
      farandole plan gpt2-small -n 64 --hosts 8 --accelerators --memory 80GiB --flops 300T --bandwidth 12G
      farandole plan tiny plan.zero=1 --check       run it, and compare
    """
    # Imports here and not above: `--help` need not wait for torch.
    from farandole.bench.planning import PlanSetup, parse_number
    from farandole.bench.setup import BenchError
    from farandole.launch.placement import LaunchError
    from farandole.memory.disk import OffloadError
    from farandole.plan import PlanError
    from farandole.train.config import ConfigError

    try:
        setup = PlanSetup(
            words=tuple(words or ()),
            ranks=ranks,
            hosts=hosts,
            memory=None if memory is None else int(parse_number("--memory", memory, 1024)),
            flops=None if flops is None else parse_number("--flops", flops, 1000),
            bandwidth=None if bandwidth is None else parse_number("--bandwidth", bandwidth, 1000),
            choices={
                "zero": zero or [],
                "hybrid": [] if hybrid is None else [hybrid],
                "recompute": recompute or [],
                "offload": offload or [],
                "offloaded": offloaded or [],
                "precision": precision or [],
                "rounding": rounding or [],
                "swap": swap or [],
            },
            accelerators=accelerators,
            remeasure=measure,
        )
        status = _answer(setup, json, picture, steps if check else None)
    except (ConfigError, PlanError, BenchError, LaunchError, OffloadError) as refusal:
        typer.echo(f"farandole plan: {refusal}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _answer(setup: PlanSetup, json: str | None, picture: str | None, steps: int | None) -> int:
    """Show the plans, and what came of the first; the exit status."""
    from rich.console import Console

    from farandole.bench import plan_table
    from farandole.bench.planning import check, plan

    planned = plan(setup)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe or a file has no edge to wrap at
    console.print(plan_table.plans(planned))
    _write(planned, json, picture)
    if steps is None:
        return 0 if planned.estimates[0].fits(planned.machine.memory) else 1
    predicted, seen = check(planned, steps)
    table, close = plan_table.checked(predicted, seen)
    console.print()
    console.print(table)
    return 0 if close else 1


def _write(planned: Planned, json: str | None, picture: str | None) -> None:
    """To the files that were asked for.  Raises `BenchError` where one cannot be written."""
    from pathlib import Path

    from farandole.bench.planning import dump
    from farandole.bench.setup import BenchError

    try:
        if json is not None:
            Path(json).write_text(dump(planned) + "\n")
        if picture is not None:
            from farandole.bench.plan_picture import draw

            draw(planned, picture)
    except (OSError, ValueError) as error:  # matplotlib raises the latter for a suffix that it does not know
        raise BenchError(f"cannot write {picture or json}: {error}") from error
