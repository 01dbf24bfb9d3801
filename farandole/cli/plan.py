"""`farandole plan`: whether a training fits, and how fast it will be, before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.config import complete_words

if TYPE_CHECKING:
    from farandole.bench.planning import Planned, PlanSetup


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRESET] [KEY=VALUE]...",
            help="The training: the same words as for farandole train.",
            show_default=False,
            autocompletion=complete_words,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            "-n",
            min=1,
            help="Processes of the job.",
            show_default="one per accelerator, else one per core, if they divide the batch",
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", "--nnodes", min=1, help="Hosts, with equal numbers of ranks.")
    ] = 1,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Memory of each rank: 16GiB.",
            show_default="the free memory of this host, divided by its ranks",
        ),
    ] = None,
    zero: Annotated[
        list[int] | None, typer.Option(help="ZeRO stages to consider.  Repeatable.", show_default="all")
    ] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(help="none, block, selective or attention.  Repeatable.", show_default="all"),
    ] = None,
    offload: Annotated[
        list[str] | None,
        typer.Option(
            help="Where to keep optimizer states: none, host or disk:FOLDER.  Repeatable.",
            show_default="none; if nothing fits, all",
        ),
    ] = None,
    offloaded: Annotated[
        list[str] | None,
        typer.Option(
            help="What to offload: optimizer, also gradients, or also parameters.  Repeatable.",
            show_default="optimizer; if nothing fits, all",
        ),
    ] = None,
    swap: Annotated[
        list[str] | None,
        typer.Option(
            help="Where to swap activations: none, host (accelerators) or disk:FOLDER.  Repeatable.",
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
            help="Rounding of bf16 weights: nearest or stochastic.  Repeatable.",
            show_default="nearest; if nothing fits, both",
        ),
    ] = None,
    hybrid: Annotated[
        bool | None,
        typer.Option(
            "--hybrid/--no-hybrid",
            help="Hybrid sharding: ZeRO divides states within each host only.",
            show_default="both, with several --nodes",
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
            "--accelerators",
            help="Plan for accelerators that this host lacks; requires the three options above.",
        ),
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Run the best plan on real ranks, and compare.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, help="Steps of --check.")] = 3,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write the plans to FILE, as JSON.", show_default=False),
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also draw them to FILE: .png, .pdf or .svg.", show_default=False),
    ] = None,
) -> None:
    """Predict memory and seconds per step of all plans for a training; the fastest plan that fits comes first.

    Nothing is trained.  The speed of this machine is measured once, in seconds, unless --flops and --bandwidth give it.
    The exit status is 1 if no plan fits, or if --check measures a peak more than 10 % from the prediction.

    \b
      farandole plan                                    the default preset on this machine
      farandole plan gpt2-small -n 8 --memory 16GiB --picture plans.png
      farandole plan my.toml micro_batch=8 --zero 2 --precision fp32 --precision bf16
      farandole plan gpt2-small -n 64 --nodes 8 --accelerators --memory 80GiB --flops 300T --bandwidth 12G
      farandole plan tiny plan.zero=1 --check       run the best plan, and compare

    \b
    The training of a model from a Hugging Face folder, of which only config.json is needed:
      farandole plan hf:llama-8b -n 64 --nodes 8 --accelerators --memory 80GiB --flops 400T --bandwidth 25G model.context=4096
    """
    # imported here so that `--help` does not wait for torch
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
            nodes=nodes,
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
    """Print the plans, and with `steps` the check of the first one; return the exit status."""
    from rich.console import Console

    from farandole.bench import plan_table
    from farandole.bench.planning import check, plan

    planned = plan(setup)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # do not wrap lines in a pipe or a file
    console.print(plan_table.plans(planned))
    _write(planned, json, picture)
    if steps is None:
        return 0 if planned.estimates[0].fits(planned.machine.memory) else 1
    predicted, measured = check(planned, steps)
    table, close = plan_table.checked(predicted, measured)
    console.print()
    console.print(table)
    return 0 if close else 1


def _write(planned: Planned, json: str | None, picture: str | None) -> None:
    """Write the requested files.  Raises `BenchError` if one cannot be written."""
    from pathlib import Path

    from farandole.bench.planning import dump
    from farandole.bench.setup import BenchError

    try:
        if json is not None:
            Path(json).write_text(dump(planned) + "\n")
        if picture is not None:
            from farandole.bench.plan_picture import draw

            draw(planned, picture)
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for an unknown suffix
        raise BenchError(f"cannot write {picture or json}: {error}") from error
