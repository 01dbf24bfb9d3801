"""`farandole bench`: measure on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from farandole.bench.setup import TrainingSetup
    from farandole.launch.placement import Placement

DEFAULT_RANKS = 2

app = typer.Typer(
    help="Measure what this machine reaches.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.callback()
def _bench() -> None:
    """Measure what this machine reaches."""  # a callback keeps a single command from taking the group's place


@app.command()
def training(
    model: Annotated[
        str, typer.Option(help="resnet18, 34, 50, 101, 152, tiny or tiny-bottleneck.")
    ] = "resnet50",
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Processes on this host.", show_default=str(DEFAULT_RANKS)),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images per rank and step.")] = 32,
    num_warmup_batches: Annotated[int, typer.Option(help="Steps before anything counts.")] = 10,
    num_batches_per_iter: Annotated[int, typer.Option(help="Steps per figure.")] = 10,
    num_iters: Annotated[int, typer.Option(help="Figures.")] = 10,
    image_size: Annotated[int, typer.Option(help="Pixels, in both directions.")] = 224,
    precision: Annotated[str, typer.Option(help="fp32, or bf16 (mixed).")] = "fp32",
    engine: Annotated[
        str, typer.Option(help="How gradients are reduced: farandole, ddp, ddp-gloo or horovod.")
    ] = "farandole",
    fp16_allreduce: Annotated[
        bool, typer.Option("--fp16-allreduce", help="Reduce gradients as fp16.")
    ] = False,
    efficiency: Annotated[
        bool, typer.Option("--efficiency", help="Compare with ranks that do not communicate, and with one.")
    ] = False,
    framework: Annotated[str, typer.Option(help="Who trains: pytorch, or tensorflow.")] = "pytorch",
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the figures there.", show_default=False)
    ] = None,
) -> None:
    """Images per second of a ResNet that trains on synthetic images, across ranks.

    Reports as Horovod's synthetic benchmark does: the mean and 1.96 standard deviations over the iterations.

    \b
      farandole bench training --model resnet50 --batch-size 64 --num-iters 5
      farandole bench training --model tiny --image-size 32 --efficiency      over in seconds
      farandole bench training --engine ddp-gloo                              torch's own, to compare
      mpirun -n 4 farandole bench training                                    under another launcher
    """
    # Imports here and not above: `--help` need not wait for torch.
    from farandole.bench.setup import BenchError, TrainingSetup
    from farandole.launch.environments import find_placement
    from farandole.launch.placement import LaunchError

    setup = TrainingSetup(
        framework=framework,
        model=model,
        batch_size=batch_size,
        image_size=image_size,
        num_warmup_batches=num_warmup_batches,
        num_batches_per_iter=num_batches_per_iter,
        num_iters=num_iters,
        precision=precision,
        engine=engine,
        fp16_allreduce=fp16_allreduce,
        efficiency=efficiency,
        json=json,
    )
    rank = 0
    try:
        placement = find_placement(os.environ)
        rank = placement.rank
        status = _measure(setup, ranks, placement)
    except (BenchError, LaunchError) as refusal:
        if rank == 0:  # under another launcher all ranks are refused alike, and one says so
            typer.echo(f"farandole bench training: {refusal}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _measure(setup: TrainingSetup, ranks: int | None, placement: Placement) -> int:
    """Measure as the rank of a job that this process is, or check everything and launch one."""
    from farandole.bench.frameworks import find_framework
    from farandole.bench.setup import BenchError
    from farandole.bench.training import run
    from farandole.launch.local import launch
    from farandole.launch.placement import ALONE

    if placement is not ALONE and ranks not in (None, placement.size):
        raise BenchError(
            f"--ranks {ranks}: {placement.launcher} has started {placement.size}; leave --ranks away"
        )
    setup.check()
    find_framework(setup.framework).check(setup)
    if placement is ALONE:
        return launch("farandole.bench.training", [setup.dump()], ranks=ranks or DEFAULT_RANKS, module=True)
    run(setup)
    return 0
