"""The command `farandole plan`: predict the memory and speed of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from farandole.bench.accelerators import ACCELERATORS, DEFAULT
from farandole.cli.config import complete_words
from farandole.cli.mistakes import KeysCommand, with_value

if TYPE_CHECKING:
    from farandole.bench.planning import Planned, PlanSetup
    from farandole.bench.serving.plan import ServingPlanSetup


SERVING = (
    *("words", "serve", "ranks", "memory", "tensor", "precision", "flops", "memory_bandwidth", "bandwidth"),
    *("prompt_tokens", "output_tokens", "max_running", "accelerators", "measure", "check", "json"),
)
"""The parameters of `plan` that can be combined with --serve."""
ONLY_SERVING = ("memory_bandwidth", "prompt_tokens", "output_tokens", "max_running")


class PlanCommand(KeysCommand):
    """The command `farandole plan`; the value of the option --accelerators may be omitted."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; --accelerators without a known name means the default accelerator."""
        return super().parse_args(ctx, with_value(args, "--accelerators", ACCELERATORS, DEFAULT))


def plan(
    context_: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PRESET|FILE|KEY=VALUE",
            help="The training run, or the model to serve: the same arguments as for farandole train.",
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
            help="Number of processes in the job.",
            show_default="one per accelerator, else one per core; fewer if needed to divide the batch",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            "--nnodes",
            min=1,
            help="Number of hosts, with equal numbers of ranks.",
            show_default="1; with --accelerators, as few hosts as possible",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Memory per rank, such as 16GiB.",
            show_default="this host's free memory divided by its ranks",
        ),
    ] = None,
    tensor: Annotated[
        list[int] | None,
        typer.Option(
            help="Sizes of the tensor axis to consider.  Repeatable.",
            show_default="1; on accelerators, all within a host",
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Sizes of the context axis to consider.  Repeatable.",
            show_default="1; on accelerators, all with at least 8,192 positions per rank",
        ),
    ] = None,
    expert: Annotated[
        list[int] | None,
        typer.Option(
            help="Sizes of the expert axis to consider.  Repeatable.",
            show_default="1; on accelerators, all up to the number of experts",
        ),
    ] = None,
    pipeline: Annotated[
        list[int] | None,
        typer.Option(
            help="Sizes of the pipeline axis to consider.  Repeatable.",
            show_default="1; on accelerators, all up to 16, if micro_batch is set",
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="Pipeline schedules to consider (farandole schedule lists them).  Repeatable.",
            show_default="1f1b, interleaved, zb-h1, zb-v and v-half",
        ),
    ] = None,
    sequence: Annotated[
        bool | None,
        typer.Option(
            "--sequence/--no-sequence",
            help="Sequence parallelism between tensor-parallel modules.",
            show_default="as configured",
        ),
    ] = None,
    zero: Annotated[
        list[int] | None, typer.Option(help="ZeRO stages to consider.  Repeatable.", show_default="all")
    ] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            help="Recomputation to consider: none, block, selective or attention.  Repeatable.",
            show_default="all",
        ),
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
            help="What to offload: optimizer (states), gradients (and optimizer states) or parameters (and both).  "
            "Repeatable.",
            show_default="optimizer; if nothing fits, all",
        ),
    ] = None,
    swap: Annotated[
        list[str] | None,
        typer.Option(
            help="Where to swap activations: none, host (for accelerators) or disk:FOLDER (for CPUs).  Repeatable.",
            show_default="none; if nothing fits, also host (accelerators) or disk:. (CPUs)",
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Precision to consider: fp32, bf16 or fp16.  Repeatable.", show_default="as configured"
        ),
    ] = None,
    rounding: Annotated[
        list[str] | None,
        typer.Option(
            help="Rounding for bf16 weights: nearest or stochastic.  Repeatable.",
            show_default="nearest; if nothing fits, both",
        ),
    ] = None,
    data_shard: Annotated[
        list[str] | None,
        typer.Option(
            "--data-shard",
            help="Hybrid sharding to consider: all, host, or the number of ranks among which ZeRO shards states.  Repeatable.",
            show_default="all; with several --nodes, also host",
        ),
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(metavar="N", help="FLOP/s per rank, such as 50G or 300T.", show_default="measured"),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Bandwidth between ranks in bytes/s, such as 12G.", show_default="measured"
        ),
    ] = None,
    host_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Bandwidth between a rank and other hosts in bytes/s, such as 50G.",
            show_default="--bandwidth applies between hosts too",
        ),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Predict the performance of serving the model instead of training."),
    ] = False,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="With --serve: mean tokens per prompt.")
    ] = 512,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", min=1, help="With --serve: mean tokens per output.")
    ] = 128,
    max_running: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="With --serve: sequences in the batch of a replica.  Repeatable.",
            show_default="1, 4, 16, ...",
        ),
    ] = None,
    memory_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="With --serve: bandwidth of a rank's memory in bytes/s, such as 3.35T.",
            show_default="measured",
        ),
    ] = None,
    accelerators: Annotated[
        str | None,
        typer.Option(
            metavar="[NAME]",
            help=f"Plan for accelerators that this host lacks: {', '.join(ACCELERATORS)} ({DEFAULT} if NAME is omitted).  "
            "Published speeds are used for speeds that are not given.",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run the best plan on real ranks, and compare the results with the prediction."
        ),
    ] = False,
    steps: Annotated[int, typer.Option(min=2, help="Number of steps for --check.")] = 3,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write the plans to FILE, as JSON.", show_default=False),
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also plot the plans to FILE (.png, .pdf or .svg).", show_default=False
        ),
    ] = None,
) -> None:
    """Predict the memory and step time of training plans.

    The command lists all plans for a training run, the fastest first.  Plans that do not fit in memory come last.
    Without --check, nothing is trained.  The command measures this machine's speed once, which takes seconds, unless
    --flops and --bandwidth specify the speed; for one rank, --flops suffices.  The exit status is 1 if no plan fits, or
    if the peak memory measured by --check differs from the prediction by more than 10 %.

    \b
      farandole plan                                    the default preset on this machine
      farandole plan gpt2-small -n 8 --memory 16GiB --picture plans.png
      farandole plan my.toml micro_batch=8 --zero 2 --precision fp32 --precision bf16
      farandole plan gpt2-small -n 64 --accelerators a100 --memory 72GiB
      farandole plan tiny plan.zero=1 --check       run the best plan and compare

    \b
    Predict a server's KV cache size, latencies and tokens per second, for replicas on one or several ranks:
      farandole plan --serve hf:FOLDER -n 2 --prompt-tokens 512 --output-tokens 128
      farandole plan --serve hf:llama-8b -n 8 --accelerators h200

    \b
    Plan for a model from a Hugging Face folder (only config.json is required):
      farandole plan hf:llama-8b -n 64 --accelerators --memory 80GiB model.context=4096
      farandole plan hf:llama-8b -n 64 --accelerators h100 --flops 400T --bandwidth 300G --host-bandwidth 50G     measured speeds
    """
    # import here, so that `--help` does not wait for torch
    from farandole.bench.options import BenchError, parse_memory, parse_number
    from farandole.launch.placement import LaunchError
    from farandole.memory.disk import OffloadError
    from farandole.plan import PlanError
    from farandole.train.config import ConfigError

    def speed(option: str, text: str | None) -> float | None:
        return None if text is None else parse_number(option, text, 1000)

    words = [*(words or ()), *_stage(zero or [])]
    try:
        _check_words(words)
        _check_options(context_, serve=serve)
        memory_bytes = None if memory is None else parse_memory("--memory", memory)
        flop_rate = speed("--flops", flops)
        rank_rate = speed("--bandwidth", bandwidth)
        host_rate = speed("--host-bandwidth", host_bandwidth)
        memory_rate = speed("--memory-bandwidth", memory_bandwidth)
    except (ConfigError, BenchError) as refusal:
        _refuse(refusal)

    from farandole.bench.planning import PlanSetup  # imports torch, which takes seconds

    try:
        if serve:
            from farandole.bench.serving.plan import ServingPlanSetup
            from farandole.planner.serving import Mix

            serving = ServingPlanSetup(
                words=tuple(words),
                mix=Mix(prompt_tokens, output_tokens),
                ranks=ranks or 1,
                memory=memory_bytes,
                flops=flop_rate,
                memory_bandwidth=memory_rate,
                bandwidth=rank_rate,
                tensor=tensor or (),
                precision=precision or (),
                running=max_running or (),
                accelerators=accelerators,
                remeasure=measure,
            )
            raise typer.Exit(_answer_serving(serving, json, is_checked=check))
        setup = PlanSetup(
            words=tuple(words),
            ranks=ranks,
            nodes=nodes,
            memory=memory_bytes,
            flops=flop_rate,
            bandwidth=rank_rate,
            host_bandwidth=host_rate,
            choices={
                "tensor": tensor or [],
                "sequence": [] if sequence is None else [sequence],
                "context": context or [],
                "expert": expert or [],
                "pipeline": pipeline or [],
                "schedule": schedule or [],
                "zero": zero or [],
                "data_shard": [int(one) if one.isdecimal() else one for one in data_shard or []],
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
        _refuse(refusal)
    raise typer.Exit(status)


def _stage(stages: list[int]) -> list[str]:
    """Return the override of `plan.zero` if --zero names exactly one stage, else an empty list."""
    # other keys may require this stage
    return [f"plan.zero={stages[0]}"] if len(stages) == 1 and stages[0] in range(4) else []


def _check_words(words: list[str]) -> None:
    """Check the configuration in `words` without importing torch; raise ConfigError if it is invalid."""
    from farandole.train.config import load_config
    from farandole.train.start import read_request

    if not any(word.startswith("hf:") for word in words):
        request = read_request(words, resume=False)
        load_config(request.source, request.overrides)


def _check_options(context: typer.Context, *, serve: bool) -> None:
    """Raise BenchError for options that conflict with --serve, or that require --serve if it is not given."""
    from farandole.bench.options import BenchError

    for name in context.params:
        source = context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        option = "--" + name.replace("_", "-")
        if serve and name not in SERVING:
            raise BenchError(f"{option} is not supported with --serve; omit one of them")
        if not serve and name in ONLY_SERVING:
            raise BenchError(f"{option} requires --serve")


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"farandole plan: {error}", err=True)
    raise typer.Exit(2) from None


def _answer(setup: PlanSetup, json: str | None, picture: str | None, steps: int | None) -> int:
    """Print and write the plans, check the first plan if `steps` is given, and return the exit status."""
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


def _answer_serving(setup: ServingPlanSetup, json: str | None, *, is_checked: bool) -> int:
    """Print the predictions for a server, check them if `is_checked`, and return the exit status."""
    from pathlib import Path

    from rich.console import Console

    from farandole.bench.options import BenchError
    from farandole.bench.serving.plan import check, checked_table, dump, plan_serving, table

    planned = plan_serving(setup)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # do not wrap lines in a pipe or a file
    console.print(table(planned))
    if json is not None:
        try:
            Path(json).write_text(dump(planned) + "\n")
        except OSError as error:
            raise BenchError(f"cannot write {json}: {error}; choose another path") from error
    if is_checked:
        found = check(planned)
        console.print()
        console.print(checked_table(found, planned.replicas(found[0][0])))
    return 0 if any(one.running <= one.fits for one in planned.estimates) else 1


def _write(planned: Planned, json: str | None, picture: str | None) -> None:
    from pathlib import Path

    from farandole.bench.options import BenchError
    from farandole.bench.planning import dump

    try:
        if json is not None:
            Path(json).write_text(dump(planned) + "\n")
        if picture is not None:
            from farandole.bench.plan_picture import draw

            draw(planned, picture)
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for unknown suffixes
        raise BenchError(f"cannot write {picture or json}: {error}; choose another path") from error
