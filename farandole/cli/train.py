"""`farandole train`: train a language model on text."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

    from farandole.train.config import TrainConfig
    from farandole.train.start import Order


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PRESET|FILE.toml] [KEY=VALUE]...", show_default=False, help="What to do."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", "-n", min=1, help="Processes to train with, on this host: 2, or as many as before."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest run, or the one whose folder is named.")
    ] = False,
) -> None:
    """Train a GPT on text, across ranks.

    With no arguments: the default preset, a small GPT that learns from the source files of the Python standard
    library in a few minutes on two cores.  Values come from a preset or a TOML file, and from key=value
    after it; a key is written with its section, as in model.width=512.

    Each run has a folder of its own, runs/NAME-DATE-TIME, with checkpoints, metrics, the loss curve and a
    sample of text.  Ctrl-C saves before it stops; --resume goes on from there.

    \b
      farandole train                                        the main job, on 2 ranks
      farandole train tiny                                   another preset, over in seconds
      farandole train data.path=notes/ steps=1000            your own text: files, folders, .jsonl, .parquet
      farandole train my.toml optimizer.learning_rate=1e-3   a configuration file
      farandole train --resume                               go on with the newest run
      farandole train --resume runs/stdlib-20260102-030405   go on with this one
      torchrun --nproc-per-node 8 -m farandole train         under another launcher
    """
    # Imports here and not above: `--help` need not wait for torch.
    from farandole.train.worker import REFUSALS

    try:
        status = _train(words or [], ranks, resume)
    except REFUSALS as refusal:
        typer.echo(f"farandole train: {refusal}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _train(words: list[str], ranks: int | None, resume: bool) -> int:
    """Join the job that this process is a rank of, or check everything and launch one."""
    from farandole.launch.environments import find_placement
    from farandole.launch.placement import ALONE
    from farandole.train.config import ConfigError
    from farandole.train.start import check, order, read_request
    from farandole.train.worker import join

    request = read_request(words, resume)
    placement = find_placement(os.environ)
    if placement is not ALONE:
        if ranks not in (None, placement.size):
            raise ConfigError(
                f"--ranks {ranks}: {placement.launcher} has started {placement.size}; leave --ranks away"
            )
        join(request)
        return 0
    start = check(request, ranks)
    _tokenize(start.config)
    return _launch(order(start), start.ranks)


def _tokenize(config: TrainConfig) -> None:
    """Have the tokens in the cache before the ranks start, with all cores and a progress bar."""
    from rich.console import Console
    from rich.progress import Progress

    from farandole.train.run import open_text

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=share)

        open_text(config, show)


def _launch(order: Order, ranks: int) -> int:
    """Start the ranks; when they fail, say how to go on."""
    from farandole.launch.local import launch
    from farandole.train.checkpoint import checkpoints

    status = launch("farandole.train.worker", [order.dump()], ranks=ranks, module=True)
    if status != 0 and (saved := checkpoints(order.run)):
        typer.echo(f"{saved[-1].name} is saved; to go on: farandole train --resume {order.run}", err=True)
    return status
