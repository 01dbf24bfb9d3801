"""The command `farandole bench`: measure training, collective and serving performance."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from farandole.cli.durations import parse_duration
from farandole.cli.mistakes import Command, CommandGroup

if TYPE_CHECKING:
    from farandole.bench.collectives.setup import CollectivesSetup
    from farandole.bench.setup import TrainingSetup
    from farandole.launch.placement import Placement

OFFERED = "one per accelerator, else one per core, at least 2"

Measurements = Annotated[
    str | None, typer.Option(metavar="FILE", help="Also write the measurements to FILE.", show_default=False)
]
Picture = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Also plot the measurements to FILE (.png, .pdf or .svg).", show_default=False
    ),
]

app = typer.Typer(
    cls=CommandGroup,
    help="Measure training, collective and serving performance.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.command(cls=Command)
def training(
    model: Annotated[
        str,
        typer.Option(
            help="Model: resnet18, resnet34, resnet50, resnet101, resnet152, tiny or tiny-bottleneck."
        ),
    ] = "resnet50",
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Number of processes in the job.", show_default=OFFERED),
    ] = None,
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", "--batch-size", help="Images per rank and step.")
    ] = 32,
    num_warmup_batches: Annotated[int, typer.Option(help="Warmup steps before the first measurement.")] = 10,
    num_batches_per_iter: Annotated[int, typer.Option(help="Steps per measurement.")] = 10,
    num_iters: Annotated[int, typer.Option(help="Number of measurements.")] = 10,
    image_size: Annotated[int, typer.Option(help="Image height and width in pixels.")] = 224,
    autocast: Annotated[
        bool, typer.Option("--autocast", help="Compute in bf16 with autocast; weights stay in fp32.")
    ] = False,
    implementation: Annotated[
        str, typer.Option(help="Gradient reduction: farandole, ddp, ddp-gloo or horovod.")
    ] = "farandole",
    fp16_allreduce: Annotated[
        bool, typer.Option("--fp16-allreduce", help="Reduce gradients in fp16.")
    ] = False,
    efficiency: Annotated[
        bool,
        typer.Option("--efficiency", help="Also measure ranks that do not communicate, and a single rank."),
    ] = False,
    framework: Annotated[str, typer.Option(help="Framework: pytorch or tensorflow.")] = "pytorch",
    json: Measurements = None,
) -> None:
    """Measure the training throughput of a ResNet.

    The images are synthetic, and the unit is images per second.  The report uses the format of Horovod's synthetic
    benchmark: the mean and 1.96 standard deviations.

    \b
      farandole bench training --model resnet50 --micro-batch 64 --num-iters 5
      farandole bench training --model tiny --image-size 32 --efficiency      finishes in seconds
      farandole bench training --implementation ddp-gloo                      PyTorch's DDP
      mpirun -n 4 farandole bench training                                    under another launcher
    """
    from farandole.bench.setup import TrainingSetup

    setup = TrainingSetup(
        framework=framework,
        model=model,
        micro_batch=micro_batch,
        image_size=image_size,
        num_warmup_batches=num_warmup_batches,
        num_batches_per_iter=num_batches_per_iter,
        num_iters=num_iters,
        autocast=autocast,
        implementation=implementation,
        fp16_allreduce=fp16_allreduce,
        efficiency=efficiency,
        json=json,
    )
    run_or_refuse("bench training", lambda placement: _train(setup, ranks, placement))


@app.command(cls=Command)
def collectives(
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="Operation: all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, gather, scatter or "
            "barrier; between two ranks, latency, bw or bibw.  Repeatable.",
            show_default="all_reduce",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Backend: farandole, shared (shared-memory buffers), gloo, mpi, farandole-mpi or nccl.  Repeatable.",
            show_default="all installed backends",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Number of processes in the job.", show_default=OFFERED),
    ] = None,
    least: Annotated[
        str, typer.Option("--min", metavar="BYTES", help="Smallest message size, such as 8, 1K or 4M.")
    ] = "8",
    most: Annotated[
        str, typer.Option("--max", metavar="BYTES", help="Largest message size.  Sizes double at each step.")
    ] = "4M",
    dtype: Annotated[str, typer.Option(help="The dtype of the elements.")] = "float32",
    reduction: Annotated[
        str, typer.Option(help="Reduction: sum, avg, product, min, max, 'and', 'or' or 'xor'.")
    ] = "sum",
    iterations: Annotated[
        int | None,
        typer.Option(
            "--iterations", "-i", help="Number of measured calls.", show_default="1000; above 8K, 100"
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option("--warmup", "-x", help="Number of warmup calls.", show_default="100; above 8K, 10"),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            "-f",
            help="Also print the minimum and maximum over ranks, and the number of iterations.",
        ),
    ] = False,
    validate: Annotated[
        bool, typer.Option("--validate", "-c", help="Check every element in every result.")
    ] = False,
    overlap: Annotated[
        bool,
        typer.Option("--overlap", help="Measure how much of a non-blocking call overlaps with computation."),
    ] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Pin each rank to its own cores.")] = False,
    json: Measurements = None,
    picture: Picture = None,
) -> None:
    """Measure the latency and bandwidth of collectives.

    All backends are measured in one run, interleaved.  The table has the same columns as the OSU Micro-Benchmarks, and
    bandwidths as defined by nccl-tests.  MPI is measured if mpi4py and mpiexec are installed (pip install mpi4py
    mpich).

    \b
      farandole bench collectives                             all_reduce on 2 ranks
      farandole bench collectives -n 4 --op all_gather --max 64M
      farandole bench collectives --op latency --op bw        between two ranks
      farandole bench collectives --overlap --backend gloo --backend farandole
      farandole bench collectives -f -c --json a.json --picture a.png
      mpirun -n 4 farandole bench collectives                 under another launcher
    """
    from farandole.bench.collectives.setup import CollectivesSetup, parse_size

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


@app.command(cls=Command)
def serving(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Start a server for the model in this folder, as with farandole serve, and measure the server.",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Measure the running server at this address instead.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model's name at --url.", show_default="the server's first model")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with the API key for --url.", show_default=False),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="With FOLDER: precision of the model, fp32 or bf16.")
    ] = "fp32",
    max_running: Annotated[
        int, typer.Option(help="With FOLDER: maximum number of sequences in the batch.")
    ] = 16,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            help="MLPerf scenario: singlestream (one request after another), offline (all at once) or server "
            "(arrivals at --rate).  Repeatable.",
            show_default="offline",
        ),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", "-n", help="Number of requests per scenario.")] = 32,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Server scenario: mean arrivals per second of a Poisson process.", show_default=False
        ),
    ] = None,
    burst: Annotated[int, typer.Option(help="Server scenario: number of requests that arrive together.")] = 1,
    prompt_tokens: Annotated[str, typer.Option(metavar="MIN:MAX", help="Tokens per prompt.")] = "8:128",
    output_tokens: Annotated[str, typer.Option(metavar="MIN:MAX", help="Tokens per output.")] = "32:128",
    seed: Annotated[int, typer.Option(help="Seed for lengths, tokens and arrivals.")] = 0,
    ttft: Annotated[
        float,
        typer.Option(
            parser=parse_duration, metavar="TIME", help="Server scenario: limit on the time to first token."
        ),
    ] = "2s",  # type: ignore[assignment]
    tpot: Annotated[
        float,
        typer.Option(
            parser=parse_duration, metavar="TIME", help="Server scenario: limit on the time per output token."
        ),
    ] = "100ms",  # type: ignore[assignment]
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Also measure the speed-up of 1, 2, 4, ... concurrent requests over sequential requests.",
        ),
    ] = False,
    json: Measurements = None,
    picture: Picture = None,
) -> None:
    """Measure the latency and throughput of a server.

    The server must have an OpenAI-compatible completions API.  Responses are streamed, and prompts and outputs have
    random lengths.  With FOLDER, the report also shows a lower bound on each time, computed from the time to read the
    weights once per step and the time to compute the matrix products.  The exit status is 1 if a request failed;
    requests refused with status 429 are counted separately.

    \b
      farandole bench serving runs                            all requests at once
      farandole bench serving runs --scenario server --rate 4 --ttft 500ms --tpot 30ms
      farandole bench serving runs --scenario singlestream --sequential --json a.json --picture a.png
      farandole bench serving --url http://127.0.0.1:8000 --model NAME
    """
    from farandole.bench.serving.setup import ServingSetup, parse_range

    def measure(placement: Placement) -> int:
        from farandole.bench.serving.run import run

        setup = ServingSetup(
            folder=folder,
            url=url,
            model=model,
            api_key_file=api_key_file,
            precision=precision,
            max_running=max_running,
            scenarios=tuple(dict.fromkeys(scenario or ["offline"])),
            requests=requests,
            rate=rate,
            burst=burst,
            prompt_tokens=parse_range("--prompt-tokens", prompt_tokens),
            output_tokens=parse_range("--output-tokens", output_tokens),
            seed=seed,
            ttft=ttft,
            tpot=tpot,
            sequential=sequential,
            json=json,
            picture=picture,
        )
        return run(setup)

    run_or_refuse("bench serving", measure)


def run_or_refuse(name: str, measure: Callable[[Placement], int]) -> NoReturn:
    """Call `measure` with this process's placement, and exit with the returned status.

    A `BenchError` or a `LaunchError` is reported as one line that begins with the command `name`.
    """
    # import here, so that `--help` does not wait for torch
    from farandole.bench.options import BenchError
    from farandole.launch.environments import find_placement
    from farandole.launch.placement import LaunchError

    rank = 0
    try:
        placement = find_placement(os.environ)
        rank = placement.rank
        status = measure(placement)
    except (BenchError, LaunchError) as refusal:
        if rank == 0:  # under another launcher, all ranks have the same error, so only rank 0 reports it
            typer.echo(f"farandole {name}: {refusal}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def launched_ranks(ranks: int | None, placement: Placement) -> int | None:
    """Return the number of ranks in the job of this process, or None if no launcher started this process.

    Raises:
        BenchError: if `ranks`, the value of --ranks, differs from the number of ranks in the job.
    """
    from farandole.bench.options import BenchError
    from farandole.launch.placement import ALONE

    if placement is ALONE:
        return None
    if ranks not in (None, placement.size):
        raise BenchError(
            f"--ranks {ranks}: this process is already one of {placement.size} ranks ({placement.launcher}); omit --ranks"
        )
    return placement.size


def default_ranks() -> int:
    """Return the default number of ranks on this host, at least 2."""
    from farandole.launch.limits import offered_ranks

    return max(2, offered_ranks())  # a single rank does not communicate


def _train(setup: TrainingSetup, ranks: int | None, placement: Placement) -> int:
    """Run the training benchmark as this rank, or launch the ranks, and return the exit status."""
    from farandole.bench.frameworks import find_framework
    from farandole.bench.training import run
    from farandole.launch.local import launch

    launched = launched_ranks(ranks, placement)
    setup.check()
    find_framework(setup.framework).check(setup)
    if launched is None:
        return launch("farandole.bench.training", [setup.dump()], ranks=ranks or default_ranks(), module=True)
    run(setup)
    return 0


def _communicate(setup: CollectivesSetup, ranks: int | None, placement: Placement) -> int:
    """Run the collectives benchmark as this rank, or launch the ranks, and return the exit status."""
    from farandole.bench.collectives.backends import choose
    from farandole.bench.collectives.run import run, start

    launched = launched_ranks(ranks, placement)
    if launched is None:
        return start(setup, ranks or default_ranks())
    setup.check(launched)
    run(choose(setup, launched, placement.launcher))
    return 0
