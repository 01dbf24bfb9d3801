"""`farandole train`: train a model across ranks."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farandole._startup import uncollected
from farandole.cli.invocation import command
from farandole.cli.mistakes import Command

if TYPE_CHECKING:
    from rich.progress import TaskID

    from farandole.train.config import TrainConfig
    from farandole.train.start import Order

PRESETS = resources.files("farandole.train") / "presets"

WORDS = f"""A preset ({", ".join(sorted(Path(file.name).stem for file in PRESETS.iterdir()))}) or a TOML file to
start from, then any number of KEY=VALUE, a key being written with its section: steps=1000 model.width=384
optimizer.learning_rate=1e-3.  With --resume also the folder of a run."""


class TrainCommand(Command):
    """Takes `--resume=RUN` for `--resume RUN`: --resume is a flag, and words are sorted by what they are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        words: list[str] = []
        for word in args:
            flag, equals, value = word.partition("=")
            words += [flag, value] if equals and flag == "--resume" else [word]
        return super().parse_args(ctx, words)


def train(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="PRESET|FILE|KEY=VALUE", show_default=False, help=WORDS)
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", "-n", min=1, help="Processes to train with, on this host: 2, or as many as before."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the last run, or the one whose folder is named.")
    ] = False,
) -> None:
    """Train a model across ranks: a GPT on text, a BERT, a ResNet, or a task of your own.

    With no arguments: the default preset, a small GPT that learns from the source files of the Python standard
    library in a few minutes on two cores.

    Each run has a folder of its own, runs/NAME-DATE-TIME, with checkpoints, metrics, the loss curve and a
    sample of text.  Ctrl-C saves before it stops; --resume goes on from there.

    \b
    The main job, on 2 ranks; another preset, over in seconds:
      farandole train
      farandole train tiny

    \b
    Text of your own (files, folders, .jsonl, .parquet); a configuration file:
      farandole train data.path=notes/ steps=1000
      farandole train my.toml optimizer.learning_rate=1e-3

    \b
    Divide optimizer states, gradients and weights among 4 ranks; keep less in memory:
      farandole train --ranks 4 plan.zero=3 plan.precision=bf16 plan.recompute=block

    \b
    Restore masked words, classify images, or a class Mine in my_module.py:
      farandole train tiny task=masked-text
      farandole train task=images data.path=photos/ images.network=resnet50
      farandole train task=my_module:Mine options.depth=3

    \b
    Go on with the last run, or with this one:
      farandole train --resume
      farandole train --resume runs/stdlib-20260102-030405

    \b
    Under another launcher:
      torchrun --nproc-per-node 8 -m farandole train

    \b
    Every key, with its default and what it means:
      {keys}
    """
    # Imports here and not above: `--help` need not wait for them.
    from farandole.launch.placement import LaunchError
    from farandole.train.start import REFUSALS

    try:
        status = _train(words or [], ranks, resume)
    except (*REFUSALS, LaunchError) as refusal:
        typer.echo(f"farandole train: {refusal}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


train.__doc__ = (train.__doc__ or "").replace("{keys}", str(PRESETS / "default.toml"))


def _train(words: list[str], ranks: int | None, resume: bool) -> int:
    """Join the job that this process is a rank of, or check everything and launch one."""
    from farandole.launch.environments import find_placement
    from farandole.launch.placement import ALONE
    from farandole.train.config import ConfigError
    from farandole.train.start import check, order, read_request

    request = read_request(words, resume)
    placement = find_placement(os.environ)
    if placement is not ALONE:
        if ranks not in (None, placement.size):
            raise ConfigError(
                f"--ranks {ranks}: {placement.launcher} has started {placement.size}; leave --ranks away"
            )
        from farandole.train.worker import join

        run = join(request)
        if placement.rank == 0:
            _say_how_to_go_on(run, 0)
        return 0
    start = check(request, ranks)
    # From here on torch is needed, which takes seconds to load.
    with uncollected():
        from farandole.train.memory import check_memory

    check_memory(start.config, start.ranks)
    _check_task(start.config)
    return _launch(order(start), start.ranks)


def _check_task(config: TrainConfig) -> None:
    """Make the task once, before the ranks start: mistakes are found, and tokens are in the cache."""
    from rich.console import Console
    from rich.progress import Progress

    from farandole.train.tasks import make_task

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=share)

        make_task(config, show)


def _launch(order: Order, ranks: int) -> int:
    """Start the ranks; when they have ended, say how to go on."""
    from farandole.launch.local import launch

    status = launch("farandole.train.worker", [order.dump()], ranks=ranks, module=True)
    _say_how_to_go_on(order.run, status)
    return status


def _say_how_to_go_on(run: Path, status: int) -> None:
    from farandole.train.config import load_config
    from farandole.train.run_folder import checkpoints

    saved = checkpoints(run)
    if status == 0 and load_config(str(run / "config.toml")).task == "text":
        typer.echo(f'generate more: {command("generate", str(run))} --prompt "def"')
    elif status and saved:
        typer.echo(f"{saved[-1].name} is saved; to go on: {command('train', '--resume', str(run))}", err=True)
    elif status:
        typer.echo(f"nothing is saved: run {run} ended before its first checkpoint", err=True)
