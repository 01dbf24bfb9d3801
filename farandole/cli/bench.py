"""`farandole bench`: measure on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from farandole.bench.collectives_setup import CollectivesSetup
    from farandole.bench.setup import TrainingSetup
    from farandole.launch.placement import Placement

DEFAULT_RANKS = 2

app = typer.Typer(
    help="Measure what this machine reaches.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


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
    from farandole.bench.setup import TrainingSetup

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
    run_or_refuse("bench training", lambda placement: _train(setup, ranks, placement))


@app.command()
def collectives(
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, gather, scatter or barrier; "
            "between two ranks latency, bw or bibw.  Repeatable.",
            show_default="all_reduce",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="farandole, shared (buffers that all ranks share), gloo, mpi, farandole-mpi or nccl.  Repeatable.",
            show_default="all that are here",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Processes on this host.", show_default=str(DEFAULT_RANKS)),
    ] = None,
    least: Annotated[str, typer.Option("--min", metavar="BYTES", help="The first size: 8, 1K, 4M.")] = "8",
    most: Annotated[str, typer.Option("--max", metavar="BYTES", help="Sizes double up to here.")] = "4M",
    dtype: Annotated[str, typer.Option(help="Type of the elements.")] = "float32",
    reduction: Annotated[str, typer.Option(help="sum, avg, product, min, max, and, or, xor.")] = "sum",
    iterations: Annotated[
        int | None,
        typer.Option("--iterations", "-i", help="Calls that count.", show_default="1000, above 8K 100"),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option("--warmup", "-x", help="Calls before them.", show_default="100, above 8K 10")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", "-f", help="Also the least and most of the ranks, and the iterations.")
    ] = False,
    validate: Annotated[
        bool, typer.Option("--validate", "-c", help="Check every element of every result.")
    ] = False,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="How much is hidden behind a computation (non-blocking calls).")
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep each rank to cores of its own.")] = False,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the figures there.", show_default=False)
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also draw them: .png, .pdf or .svg.", show_default=False),
    ] = None,
) -> None:
    """Latency and bandwidth of collectives, of every backend that is here, taking turns in one run.

    Columns as the OSU Micro-Benchmarks have them, and the bandwidths of nccl-tests.  MPI takes part where mpi4py and
    mpiexec are installed (pip install mpi4py mpich).

    \b
      farandole bench collectives                             all_reduce on 2 ranks
      farandole bench collectives -n 4 --op all_gather --max 64M
      farandole bench collectives --op latency --op bw        between two ranks
      farandole bench collectives --overlap --backend gloo --backend farandole
      farandole bench collectives -f -c --json a.json --picture a.png
      mpirun -n 4 farandole bench collectives                 under another launcher
    """
    from farandole.bench.collectives_setup import CollectivesSetup, parse_size

    def measure(placement: Placement) -> int:
        setup = CollectivesSetup(
            operations=tuple(dict.fromkeys(op or ["all_reduce"])),
            backends=tuple(dict.fromkeys(backend or [])),
            min=parse_size("--min", least),
            max=parse_size("--max", most),
            dtype=dtype,
            reduction=reduction,
            iterations=iterations,
            warmup=warmup,
            full=full,
            validate=validate,
            overlap=overlap,
            pin=pin,
            json=json,
            picture=picture,
        )
        return _communicate(setup, ranks, placement)

    run_or_refuse("bench collectives", measure)


def run_or_refuse(name: str, measure: Callable[[Placement], int]) -> NoReturn:
    """Measure where this process has its place, and end with the status; what is refused is said in a line."""
    # Imports here and not above: `--help` need not wait for torch.
    from farandole.bench.setup import BenchError
    from farandole.launch.environments import find_placement
    from farandole.launch.placement import LaunchError

    rank = 0
    try:
        placement = find_placement(os.environ)
        rank = placement.rank
        status = measure(placement)
    except (BenchError, LaunchError) as refusal:
        if rank == 0:  # under another launcher all ranks are refused alike, and one says so
            typer.echo(f"farandole {name}: {refusal}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def ranks_there(ranks: int | None, placement: Placement) -> int | None:
    """How many ranks another launcher has started; None where this process is to start them."""
    from farandole.bench.setup import BenchError
    from farandole.launch.placement import ALONE

    if placement is ALONE:
        return None
    if ranks not in (None, placement.size):
        raise BenchError(
            f"--ranks {ranks}: {placement.launcher} has started {placement.size}; leave --ranks away"
        )
    return placement.size


def _train(setup: TrainingSetup, ranks: int | None, placement: Placement) -> int:
    """Measure as the rank of a job that this process is, or check everything and launch one."""
    from farandole.bench.frameworks import find_framework
    from farandole.bench.training import run
    from farandole.launch.local import launch

    there = ranks_there(ranks, placement)
    setup.check()
    find_framework(setup.framework).check(setup)
    if there is None:
        return launch("farandole.bench.training", [setup.dump()], ranks=ranks or DEFAULT_RANKS, module=True)
    run(setup)
    return 0


def _communicate(setup: CollectivesSetup, ranks: int | None, placement: Placement) -> int:
    """The same for collectives."""
    from farandole.bench.collectives import run, start
    from farandole.bench.collectives_backends import choose

    there = ranks_there(ranks, placement)
    if there is None:
        return start(setup, ranks or DEFAULT_RANKS)
    setup.check(there)
    run(choose(setup, there, placement.launcher))
    return 0
