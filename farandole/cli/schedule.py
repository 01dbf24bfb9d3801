"""The command `farandole schedule`: list, simulate, draw and search pipeline schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farandole.cli.mistakes import Command

if TYPE_CHECKING:
    from rich.table import Table

    from farandole.parallel.pipeline.search import Found
    from farandole.parallel.pipeline.simulate import Costs, Timeline

_PICTURE = "schedule.png"


class ScheduleCommand(Command):
    """The command `farandole schedule`; the value of the option --draw may be omitted."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; --draw without a file uses the default file."""
        complete: list[str] = []
        for number, word in enumerate(args):
            complete.append(word)
            following = args[number + 1] if number + 1 < len(args) else "-"
            if word == "--draw" and following.startswith("-"):
                complete.append(_PICTURE)
        return super().parse_args(ctx, complete)


def _complete_names(incomplete: str) -> list[str]:
    from farandole.parallel.pipeline.schedule import registered

    return [each.name for each in registered() if each.name.startswith(incomplete)]


def schedule(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="The schedules to simulate.  Without a name, list all schedules.",
            show_default=False,
            autocompletion=_complete_names,
        ),
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="Number of pipeline ranks, D.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Number of micro-batches per step, N.")] = 8,
    parts: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-batches per pass of a GEMS schedule.", show_default="1"),
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(min=1, help="Chunks per rank of interleaved 1F1B.", show_default="2")
    ] = None,
    draw: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE]",
            help="Draw the timelines to FILE (.png, .svg, .pdf), or write a trace for Perfetto (.json).",
            show_default=f"{_PICTURE} if FILE is omitted",
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Search for the best schedule with these costs, within --memory.")
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(
            help="Limit for the activations on a rank, in the unit of --activation.", show_default="no limit"
        ),
    ] = None,
    forward: Annotated[
        str,
        typer.Option(metavar="TIME", help="Time of a rank's forward pass, or one time per stage: 1,1,2,1."),
    ] = "1",
    input_gradient: Annotated[
        str, typer.Option("--input", metavar="TIME", help="Time of a rank's input gradient.")
    ] = "1",
    weight_gradient: Annotated[
        str, typer.Option("--weight", metavar="TIME", help="Time of a rank's weight gradient.")
    ] = "1",
    send: Annotated[float, typer.Option(metavar="TIME", min=0, help="Time until a tensor arrives.")] = 0.0,
    activation: Annotated[
        str, typer.Option(metavar="SIZE", help="Activations of one micro-batch on a rank.")
    ] = "1",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Repeat forward passes in the backward pass.")
    ] = False,
    stage_input: Annotated[
        float, typer.Option(metavar="SIZE", min=0, help="Size of a stage's input, with --recompute.")
    ] = 0.0,
) -> None:
    """Compare and draw pipeline schedules.

    The command simulates schedules, and prints their makespan, idle time, activations and timeline.  Nothing is
    trained.  Times and sizes can have any unit.

    \b
      farandole schedule                                    list all schedules with their idle time and activations
      farandole schedule gems --stages 4 --micro-batches 8 --draw
      farandole schedule 1f1b zb-v --micro-batches 16 --forward 1 --input 1.5 --weight 0.8 --draw both.svg
      farandole schedule 1f1b --draw trace.json             for https://ui.perfetto.dev
      farandole schedule --search --stages 4 --micro-batches 16 --memory 2 --input 1.5
    """
    from farandole.parallel.pipeline.schedule import ScheduleError

    options = {name: value for name, value in (("parts", parts), ("chunks", chunks)) if value is not None}
    try:
        costs = _costs(forward, input_gradient, weight_gradient, activation, send, recompute, stage_input)
        if memory is not None and not search:
            raise ScheduleError("--memory requires --search: add --search, or omit --memory")
        if search:
            if names or options:
                raise ScheduleError(
                    "--search compares all schedules and does not support schedule names, --parts or --chunks; "
                    "omit them"
                )
            timelines = _search(stages, micro_batches, costs, math.inf if memory is None else memory)
        else:
            timelines = _simulate(names or [], stages, micro_batches, costs, options)
        if draw is not None:
            from farandole.parallel.pipeline.draw import write

            write(timelines, draw)
            typer.echo(f"\nwrote {draw}")
    except (ScheduleError, OSError, ValueError) as refusal:
        typer.echo(f"farandole schedule: {refusal}", err=True)
        raise typer.Exit(2) from None


def _costs(forward: str, input_: str, weight: str, activation: str, send: float, recompute: bool, stage_input: float) -> Costs:  # fmt: skip
    from farandole.parallel.pipeline.schedule import ScheduleError
    from farandole.parallel.pipeline.simulate import Costs

    if stage_input and not recompute:
        raise ScheduleError("--stage-input requires --recompute: add --recompute, or omit --stage-input")

    def parse(option: str, text: str) -> float | list[float]:
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = [-1.0]
        if min(numbers) < 0:
            raise ScheduleError(
                f"{option} {text}: expected a number of at least 0, or one such number per stage, as in 1,1,2,1"
            )
        return numbers if len(numbers) > 1 else numbers[0]

    return Costs(
        forward=parse("--forward", forward),
        input=parse("--input", input_),
        weight=parse("--weight", weight),
        activation=parse("--activation", activation),
        send=send,
        recompute=recompute,
        stage_input=stage_input,
    )


def _simulate(
    names: Sequence[str], ranks: int, micro_batches: int, costs: Costs, options: dict[str, int]
) -> list[Timeline]:
    """Simulate schedules (all if `names` is empty), print the results, and return the timelines."""
    from farandole.parallel.pipeline.draw import summary, text
    from farandole.parallel.pipeline.schedule import ScheduleError, build, named, registered
    from farandole.parallel.pipeline.simulate import simulate

    chosen = [named(name) for name in names] or list(registered())
    for option in options:
        if not any(option in each.options for each in chosen):
            known = ", ".join(each.name for each in registered() if option in each.options)
            raise ScheduleError(f"--{option} applies only to {known}; omit --{option}")
    timelines, reasons = [], {}
    for each in chosen:
        own = {option: value for option, value in options.items() if option in each.options}
        try:
            timelines.append(simulate(build(each.name, ranks, micro_batches, **own), costs))
        except ScheduleError as error:
            if names:
                raise
            reasons[each.name] = str(error)
    if not names:
        _print(_table(timelines, reasons, ranks, micro_batches))
        return timelines
    for timeline in timelines:
        typer.echo(f"{timeline.schedule.name}: {summary(timeline)}")
        typer.echo(text(timeline) + "\n")
    typer.echo(
        "F forward, B backward, I input gradient, W weight gradient; lower case: later chunk or second replica"
    )
    return timelines


def _table(timelines: Sequence[Timeline], reasons: dict[str, str], ranks: int, micro_batches: int) -> Table:
    from rich.table import Table

    from farandole.parallel.pipeline.schedule import registered

    table = Table(
        "schedule", "idle", "activations", "weights", "description",
        title=f"{ranks} ranks, {micro_batches} micro-batches", box=None, title_justify="left", pad_edge=False,
    )  # fmt: skip
    found = {timeline.schedule.name: timeline for timeline in timelines}
    for each in registered():
        if each.name in found:
            timeline = found[each.name]
            weights = "2x" if timeline.schedule.mirrored else "1x"
            idle = f"{100 * timeline.idle:.1f} %"
            table.add_row(each.name, idle, f"{timeline.peak:g}", weights, each.summary)
        else:
            table.add_row(each.name, "", "", "", reasons.get(each.name, ""))
    return table


def _search(ranks: int, micro_batches: int, costs: Costs, memory: float) -> list[Timeline]:
    """Search for the fastest schedule, print it, and return its timeline."""
    from farandole.parallel.pipeline.draw import summary, text
    from farandole.parallel.pipeline.search import search

    found = search(ranks, micro_batches, costs, memory)
    best = found.best
    typer.echo(f"best schedule found: {best.schedule.name}")
    typer.echo(summary(best))
    percent = 100 * (best.makespan / found.bound - 1) if found.bound else 0.0
    typer.echo(f"at most {percent:.1f} % slower than the optimum (lower bound {found.bound:g})\n")
    typer.echo(text(best) + "\n")
    _print(_comparison(found, memory))
    return [best]


def _comparison(found: Found, memory: float) -> Table:
    from rich.table import Table

    table = Table("schedule", "makespan", "against the best", "activations", "", box=None, pad_edge=False)
    for name, timeline in sorted(found.named.items(), key=lambda item: item[1].makespan):
        percent = 100 * (timeline.makespan / found.best.makespan - 1) if found.best.makespan else 0.0
        fits = "" if timeline.peak <= memory + 1e-9 else "does not fit"
        table.add_row(name, f"{timeline.makespan:g}", f"{percent:+.1f} %", f"{timeline.peak:g}", fits)
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # do not wrap lines in a pipe or a file
    console.print(table)
