"""The command `farandole train`: train a model across ranks."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farandole._startup import uncollected
from farandole.cli.config import complete_words
from farandole.cli.invocation import command
from farandole.cli.mistakes import KeysCommand

if TYPE_CHECKING:
    from rich.progress import TaskID

    from farandole.train.config import TrainConfig
    from farandole.train.start import TrainingJobSpec

PRESETS = resources.files("farandole.train") / "presets"

WORDS = f"""A preset ({", ".join(sorted(Path(file.name).stem for file in PRESETS.iterdir()))}) or a TOML file, then
any number of KEY=VALUE arguments with full key names: steps=1000 model.width=384 optimizer.learning_rate=1e-3.  With --resume, also a run's folder."""


class TrainCommand(KeysCommand):
    """The command `farandole train`, which accepts `--resume=RUN` as well as `--resume RUN`.

    The option --resume is a flag, and RUN is an argument.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split `--resume=RUN` into two arguments, and then parse all arguments."""
        words: list[str] = []
        for word in args:
            flag, equals, value = word.partition("=")
            words += [flag, value] if equals and flag == "--resume" else [word]
        return super().parse_args(ctx, words)


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PRESET|FILE|KEY=VALUE", show_default=False, help=WORDS, autocompletion=complete_words
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            "-n",
            min=1,
            help="Number of processes in the job.",
            show_default="one per accelerator, else one per core; fewer if needed to divide the batch; with --resume, "
            "as before",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the last run, or the run in the given folder.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the configuration, the data, the memory and the folder of runs without training.",
        ),
    ] = False,
) -> None:
    """Train or fine-tune a model on any number of ranks.

    Without arguments, the command trains the preset `default`: a small GPT on the source files of the Python standard
    library, which takes a few minutes on two cores.

    Each run writes checkpoints, metrics, the loss curve and a text sample to its own folder, runs/NAME-DATE-TIME.
    Ctrl-C saves a checkpoint and stops the run; --resume continues a run.

    \b
    The default preset, a tiny preset that takes seconds, and a check without training:
      farandole train
      farandole train tiny
      farandole train gpt2-small --dry-run

    \b
    Your own text (files, folders, .jsonl, .parquet), and a configuration file:
      farandole train data.path=notes/ steps=1000
      farandole train my.toml optimizer.learning_rate=1e-3

    \b
    Fine-tune a model from a Hugging Face folder on conversations, on text, or as a classifier:
      farandole train sft model=FOLDER data.path=chat.jsonl plan.lora_rank=16
      farandole train pretrain model=FOLDER data.path=notes/
      farandole train classify model=FOLDER data.path=reviews.jsonl

    \b
    Shard optimizer states, gradients and weights across 4 ranks, with bf16 and recomputation:
      farandole train --ranks 4 plan.zero=3 plan.precision=bf16 plan.recompute=block

    \b
    Train on masked tokens, classify images, or train the task Mine in my_module.py:
      farandole train tiny task=masked-text
      farandole train task=images data.path=photos/ images.network=resnet50
      farandole train task=my_module:Mine options.depth=3

    \b
    Resume the last run or a specific run:
      farandole train --resume
      farandole train --resume runs/stdlib-20260102-030405

    \b
    On several hosts, and under another launcher:
      farandole launch --hosts node0:4,node1:4 -m farandole train
      torchrun --nproc-per-node 8 -m farandole train

    \b
    List every key with its default and description:
      farandole config keys
    """
    # import here, so that `--help` does not wait for these modules
    from farandole.launch.placement import LaunchError
    from farandole.train.start import REFUSALS

    try:
        status = _train(words or [], ranks, resume, dry_run)
    except (*REFUSALS, LaunchError) as refusal:
        typer.echo(f"farandole train: {refusal}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _train(words: list[str], ranks: int | None, resume: bool, dry_run: bool) -> int:
    """Train as this rank, or check the run and launch the ranks, and return the exit status."""
    from farandole.launch.environments import find_placement
    from farandole.launch.limits import offered_ranks
    from farandole.launch.placement import ALONE
    from farandole.train.config import ConfigError
    from farandole.train.start import check, job_spec, read_request, task_config

    request = read_request(words, resume)
    placement = find_placement(os.environ)
    if placement is not ALONE:
        if ranks not in (None, placement.size):
            raise ConfigError(
                f"--ranks {ranks}: this process is already one of {placement.size} ranks ({placement.launcher}); omit --ranks"
            )
        if dry_run:
            raise ConfigError(
                f"--dry-run runs without ranks, but {placement.launcher} started this process as a rank; "
                f"run farandole train --dry-run without the launcher"
            )
        from farandole.train.run import join

        run = join(request)
        if placement.rank == 0:
            _print_next_step(run, 0)
        return 0
    start = check(request, ranks)
    if ranks is None and start.checkpoint is None and start.ranks < (offered := offered_ranks()):
        typer.echo(
            f"training on {start.ranks} of {offered} cores or accelerators, the largest number of ranks that suits "
            f"batch={start.config.batch} and the plan",
            err=True,
        )
    with uncollected():  # importing torch takes seconds
        from farandole.train.memory import check_memory, summary

    prepared = task_config(start.config, start.checkpoint)
    check_memory(prepared, start.ranks)
    _check_task(prepared)
    if dry_run:
        for name, text in summary(start).items():
            typer.echo(f"{name:<14} {text}")
        return 0
    return _launch(job_spec(start), start.ranks)


def _check_task(config: TrainConfig) -> None:
    """Create and discard the task, to report errors early and to cache the tokens for the ranks."""
    from rich.console import Console
    from rich.progress import Progress

    from farandole.cli.notices import shown_notices
    from farandole.train.tasks import make_task

    console = Console(stderr=True)
    with (
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
        shown_notices("farandole.data"),
    ):
        tasks: dict[str, TaskID] = {}

        def show(activity: str, share: float) -> None:
            if activity not in tasks:
                tasks[activity] = bar.add_task(activity, total=1.0)
            bar.update(tasks[activity], completed=share)

        make_task(config, show)


def _launch(job_spec: TrainingJobSpec, ranks: int) -> int:
    """Run the ranks, print a command to run next, and return the ranks' exit status."""
    from farandole.launch.local import launch

    status = launch("farandole.train.run", [job_spec.dump()], ranks=ranks, module=True)
    _print_next_step(job_spec.run, status)
    return status


def _print_next_step(run: Path, status: int) -> None:
    from farandole.train.config import load_config
    from farandole.train.run_folder import checkpoints

    saved = checkpoints(run)
    if status == 0 and load_config(str(run / "config.toml")).task in ("text", "sft"):
        with suppress(OSError, UnicodeEncodeError):  # the run is complete, even if standard output is closed
            typer.echo(f'generate more: {command("generate", str(run))} --prompt "def"')
    elif status and saved:
        typer.echo(
            f"{saved[-1].name} is saved; to resume: {command('train', '--resume', str(run))}", err=True
        )
    elif status:
        typer.echo(f"no checkpoint was saved, because run {run} ended before its first checkpoint", err=True)
