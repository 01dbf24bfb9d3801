"""The command `farandole serve`: an HTTP server for a language model or an encoder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.durations import parse_duration

END_TIMEOUT_S = 30
"""The time in seconds that the ranks have to exit after the drain timeout (`--drain-timeout`) has expired."""


ENCODER_OPTIONS = (
    "folder", "port", "host", "name", "precision", "context", "max_waiting", "token_budget", "api_keys", "max_body",
    "request_timeout", "drain_timeout",
)  # fmt: skip
"""The names of the options that are allowed if the model is an encoder, which computes embeddings."""
ENCODER_DEFAULTS = {"max_waiting": 2048, "token_budget": 4096}
"""The default values of the options whose defaults for an encoder differ from those for a language model."""


def serve(
    ctx: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A Hugging Face folder, a checkpoint, a run, or a folder of runs."
        ),
    ],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port.  0: any free port.")
    ] = 8000,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on.  0.0.0.0: all networks.")
    ] = "127.0.0.1",
    name: Annotated[
        str, typer.Option("--name", help="The model's name in requests.", show_default="the folder's name")
    ] = "",
    precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16.")] = "fp32",
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            help="int8: compute products with int8 weights, which need a quarter of the memory of fp32 weights.",
            show_default="as --precision",
        ),
    ] = "",
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, help="Maximum tokens of a prompt and its output.", show_default="the model's"
        ),
    ] = None,
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, max=4096, help="Maximum sequences in the batch.")
    ] = 16,
    max_waiting: Annotated[
        int,
        typer.Option(
            "--max-waiting", min=1, help="Maximum waiting sequences.  Further requests get status 429."
        ),
    ] = 256,
    token_budget: Annotated[
        int, typer.Option("--token-budget", min=1, help="Maximum tokens per step, at least --max-running.")
    ] = 256,
    tensor: Annotated[
        int | None,
        typer.Option(
            "--tensor",
            min=1,
            help="Number of tensor-parallel ranks.",
            show_default="the ranks of the launcher divided by --replicas, else 1",
        ),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option("--replicas", min=1, help="Number of replicas of the model, each on --tensor ranks."),
    ] = 1,
    ttft: Annotated[
        float | None,
        typer.Option(
            "--ttft",
            parser=parse_duration,
            metavar="TIME",
            help="Target time to first token, such as 2s.  Requests that would miss it get status 429.",
            show_default="none",
        ),
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option(
            "--tpot",
            parser=parse_duration,
            metavar="TIME",
            help="Target time per output token, such as 100ms.  Requests that would miss it wait.",
            show_default="none",
        ),
    ] = None,
    kv_memory: Annotated[
        float | None,
        typer.Option(
            "--kv-memory",
            min=0.001,
            help="Size of the KV cache on each rank, in GiB.",
            show_default="enough for --max-running sequences, at most half of the free memory",
        ),
    ] = None,
    store: Annotated[
        str, typer.Option("--store", help="How the KV cache is stored: pages (shared prefixes) or slots.")
    ] = "pages",
    speculate: Annotated[
        str,
        typer.Option(
            "--speculate",
            help="Speculative decoding: lookup (proposes tokens from the request's own text), draft (with --draft) or off.",
        ),
    ] = "off",
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft",
            metavar="FOLDER",
            help="The folder of a smaller model with the same tokenizer, for --speculate draft.",
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            metavar="NAME=FOLDER",
            help="A LoRA adapter in PEFT format, which requests select with model=NAME.  Can be repeated.",
            show_default="none",
        ),
    ] = None,
    chat_template: Annotated[
        str,
        typer.Option(
            "--chat-template",
            metavar="FILE|chatml",
            help="A file with a Jinja template, or chatml.",
            show_default="the model's",
        ),
    ] = "",
    api_keys: Annotated[
        Path | None,
        typer.Option(
            "--api-keys", metavar="FILE", help="A file with the SHA-256 hash of one API key per line."
        ),
    ] = None,
    max_body: Annotated[
        float, typer.Option("--max-body", min=0.001, help="Maximum size of a request, in MiB.")
    ] = 8.0,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", min=0.1, help="Maximum seconds per request.")
    ] = 600.0,
    drain_timeout: Annotated[
        int,
        typer.Option("--drain-timeout", min=0, help="Seconds that running requests may take after SIGTERM."),
    ] = 60,
) -> None:
    """Serve a model with an OpenAI-compatible API.

    The server answers /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /health and /metrics.  At /, it
    serves a web page with the current load and a chat.  The server listens on this machine only, unless --host is
    given.  After SIGTERM, the server completes the running requests and exits.  The server of an encoder (BERT) offers
    /v1/embeddings instead of completions, and its page shows the similarities between texts.

    \b
      farandole serve runs --port 8000
      farandole serve FOLDER --precision bf16 --max-running 64
      farandole serve FOLDER --weights int8
      farandole serve FOLDER --tensor 2        shard the model across 2 ranks
      farandole serve FOLDER --replicas 2      2 ranks, each with the whole model
      mpirun -n 2 farandole serve FOLDER       the same, under another launcher
      farandole serve FOLDER --ttft 2s --tpot 100ms
      farandole serve FOLDER --speculate draft --draft SMALLER_FOLDER
      farandole serve FOLDER --lora french=ADAPTER_FOLDER --lora code=OTHER_FOLDER
      farandole serve FOLDER --host 0.0.0.0 --api-keys keys.txt
    """
    # import here, so that `--help` does not wait for torch
    from farandole.data.errors import DataError
    from farandole.launch.environments import find_placement
    from farandole.launch.placement import ALONE, LaunchError
    from farandole.models.hf.fields import FolderError
    from farandole.serve.encoder import is_encoder
    from farandole.serve.http.start import check_start, start, start_encoder
    from farandole.serve.request import RequestError
    from farandole.train.config import ConfigError
    from farandole.train.run_folder import CheckpointError

    rank = 0
    try:
        placement = find_placement(os.environ)
        rank = placement.rank
        if is_encoder(folder.expanduser()):
            if placement.size > 1:
                raise FolderError(
                    f"{folder} contains an encoder; encoders run on a single rank, got {placement.size} ranks; "
                    "omit the launcher"
                )
            sources = {option: ctx.get_parameter_source(option) for option in ctx.params}
            given = {
                option
                for option, source in sources.items()
                if source is not None and source.name == "COMMANDLINE"
            }
            if others := sorted(given - set(ENCODER_OPTIONS)):
                raise RequestError(
                    others[0], "not supported for a model that computes embeddings; omit this option"
                )
            options = {option: ctx.params[option] for option in ENCODER_OPTIONS}
            options |= {option: value for option, value in ENCODER_DEFAULTS.items() if option not in given}
            start_encoder(**options)
            return
        if placement is not ALONE:
            if placement.size % replicas:
                raise RequestError(
                    "replicas",
                    f"expected a divisor of {placement.size} (the number of ranks of {placement.launcher}), got "
                    f"{replicas}",
                )
            width = placement.size // replicas
            if tensor not in (None, width):
                raise RequestError(
                    "tensor",
                    f"expected {width} (the number of ranks of {placement.launcher}, divided by --replicas), got "
                    f"{tensor}; omit --tensor",
                )
        elif (ranks := replicas * (tensor or 1)) > 1:
            from farandole.launch.local import launch

            check_start(
                folder,
                host=host,
                port=port,
                api_keys=api_keys,
                tensor=tensor or 1,
                lora=lora or (),
                weights=weights,
            )
            end = drain_timeout + END_TIMEOUT_S
            raise typer.Exit(launch("farandole", sys.argv[1:], ranks=ranks, module=True, stop_timeout_s=end))
        runtime = None
        if placement.size > 1:
            import farandole

            runtime = farandole.init()
        start(
            folder,
            host=host,
            port=port,
            name=name,
            precision=precision,
            weights=weights,
            context=context,
            max_running=max_running,
            max_waiting=max_waiting,
            token_budget=token_budget,
            ttft=ttft,
            tpot=tpot,
            kv_memory=kv_memory,
            store=store,
            speculate=speculate,
            draft=draft,
            lora=lora or (),
            chat_template=chat_template,
            api_keys=api_keys,
            max_body=max_body,
            request_timeout=request_timeout,
            drain_timeout=drain_timeout,
            replicas=replicas,
            runtime=runtime,
        )
    except RequestError as refusal:
        option = "--" + refusal.field.replace("_", "-")
        if rank == 0:  # the error is raised on all ranks
            typer.echo(f"farandole serve: {option}: {str(refusal).partition(': ')[2]}", err=True)
        raise typer.Exit(2) from None
    except (CheckpointError, ConfigError, DataError, FolderError, LaunchError) as refusal:
        if rank == 0:
            typer.echo(f"farandole serve: {refusal}", err=True)
        raise typer.Exit(2) from None
