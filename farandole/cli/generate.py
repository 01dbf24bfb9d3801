"""The command `farandole generate`: generate text with a trained model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from farandole.serve.llm import LLM
    from farandole.serve.request import Sampling


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a run, or a folder of runs.")
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The beginning of the text.", show_default="def")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-t", min=1, help="Number of tokens to generate.")] = 200,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Below 1: less random text.  Above 1: more random text.  0: always choose the most likely token.",
        ),
    ] = 0.7,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="Sample from the N most likely tokens.  0: from all tokens.")
    ] = 50,
    seed: Annotated[
        int, typer.Option(min=0, max=2**64 - 1, help="Random seed.  The same seed generates the same text.")
    ] = 0,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="A file with one JSON object per line, each with prompt or messages.",
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="The file for the results of --input, in the same order."
        ),
    ] = None,
    tensor: Annotated[
        int | None,
        typer.Option(
            "--tensor",
            min=1,
            help="Number of tensor-parallel ranks.",
            show_default="the ranks of the launcher, else 1",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            help="int8: compute products with int8 weights, which need a quarter of the memory of fp32 weights.",
            show_default="fp32",
        ),
    ] = "",
) -> None:
    """Continue a prompt with a trained model, and print the text.

    With --input, the command continues all prompts in a file, many at a time, and writes the results to --output.  If
    the command is interrupted, run it again to continue after the last complete line.

    For a run or a folder of runs, the command uses the newest checkpoint.

    \b
      farandole generate runs/stdlib-20260102-030405 --prompt "class Queue:"
      farandole generate runs --prompt "import" --tokens 400 --temperature 1 --seed 7
      farandole generate FOLDER --input prompts.jsonl --output out.jsonl --temperature 0
      farandole generate FOLDER --prompt "import" --weights int8
      farandole generate FOLDER --prompt "import" --tensor 2    shard the model across 2 ranks
      mpirun -n 2 farandole generate FOLDER --prompt "import"   the same, under another launcher
    """
    # import here, so that `--help` does not wait for torch
    from farandole.launch.environments import find_placement
    from farandole.launch.placement import LaunchError

    try:
        placement = find_placement(os.environ)
    except LaunchError as refusal:
        _refuse(refusal)
    tensor = tensor or placement.size
    is_file = input_file is not None or output_file is not None
    if is_file or weights or tensor > 1 or placement.size > 1:
        sampling = {"max_tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
        _generate_together(
            checkpoint,
            prompt,
            input_file,
            output_file,
            placement.rank,
            sampling,
            is_file=is_file,
            tensor=tensor,
            weights=weights,
        )
        return
    from farandole.data.errors import DataError
    from farandole.models.hf.fields import FolderError
    from farandole.train.config import ConfigError
    from farandole.train.run_folder import CheckpointError, newest_checkpoint

    prompt = "def" if prompt is None else prompt
    try:
        _check_prompt(prompt)
        chosen = newest_checkpoint(checkpoint)

        from farandole.models.generate import generate as tokens_after
        from farandole.serve.text import TextStream
        from farandole.train.weights import load_model

        model, tokenizer, config = load_model(chosen)
    except (CheckpointError, ConfigError, DataError, FolderError) as refusal:
        _refuse(refusal)
    given = tokenizer.encode(prompt).ids
    if not given:
        typer.echo("farandole generate: the prompt is empty; expected at least one character", err=True)
        raise typer.Exit(2)
    if chosen != checkpoint:
        typer.echo(f"from {chosen}", err=True)
    text = TextStream(tokenizer, prompt=given)
    sys.stdout.write(prompt)
    for token in tokens_after(
        model, given, tokens, context=config.model.context, temperature=temperature, top_k=top_k, seed=seed
    ):
        sys.stdout.write(text.add(token))
        sys.stdout.flush()
    sys.stdout.write(text.finish() + "\n")


def _generate_together(
    folder: Path,
    prompt: str | None,
    input_file: Path | None,
    output_file: Path | None,
    rank: int,
    parameters: dict[str, Any],
    *,
    is_file: bool,
    tensor: int,
    weights: str,
) -> None:
    """Generate with the serving engine, which supports several prompts and several ranks."""
    from farandole.data.errors import DataError
    from farandole.launch.placement import LaunchError
    from farandole.models.hf.fields import FolderError
    from farandole.serve.batch import check_output
    from farandole.serve.llm import LLM
    from farandole.serve.ranks.errors import RanksFailed
    from farandole.serve.request import RequestError, Sampling
    from farandole.train.config import ConfigError
    from farandole.train.run_folder import CheckpointError

    try:
        if is_file and (input_file is None or output_file is None):
            given, missing = ("--output", "--input") if input_file is None else ("--input", "--output")
            raise DataError(f"expected --input and --output together, got only {given}; add {missing}")
        if is_file and prompt is not None:
            raise DataError("--prompt and --input are mutually exclusive; omit one of them")
        prompt = "def" if prompt is None else prompt
        _check_prompt(prompt)
        sampling = Sampling(**parameters)
        if rank == 0 and input_file is not None and output_file is not None:
            check_output(input_file, output_file)  # before the model is loaded
        with LLM(folder, tensor=tensor, weights=weights) as llm:
            if llm.rank:  # when the block ends, this rank computes with rank 0 until rank 0 has finished
                return
            if input_file is not None and output_file is not None:
                _write_file(llm, input_file, output_file, sampling)
            else:
                _print_text(llm, prompt, sampling)
    except RanksFailed as failure:
        typer.echo(f"farandole generate: {failure}", err=True)
        raise typer.Exit(1) from None
    except (CheckpointError, ConfigError, DataError, FolderError, LaunchError, RequestError) as refusal:
        if rank == 0:  # the error is raised on all ranks
            _refuse(refusal)
        raise typer.Exit(2) from None


def _check_prompt(prompt: str) -> None:
    """Raise `DataError` if the prompt is not valid UTF-8."""
    from farandole.data.errors import DataError

    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # sys.argv represents invalid bytes as surrogates
        raise DataError(
            f"expected a prompt in UTF-8, found {prompt[error.start]!a} at character {error.start + 1}; correct the prompt"
        ) from None


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"farandole generate: {error}", err=True)
    raise typer.Exit(2) from None


def _print_text(llm: LLM, prompt: str, sampling: Sampling) -> None:
    """Print the prompt, and then stream the continuation."""

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    write(prompt)
    for _ in llm.stream(
        [prompt], sampling, progress=lambda outputs: write("".join(each.text for each in outputs))
    ):
        write("\n")


def _write_file(llm: LLM, input_file: Path, output_file: Path, sampling: Sampling) -> None:
    """Continue all prompts in `input_file`, write the results to `output_file`, and show progress."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    from farandole.serve.batch import generate_file

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("generate", total=None, speed="")

        def show(done: int, total: int, new: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0
            speed = f"{new / elapsed:.0f} tokens/s" if elapsed else ""
            bar.update(task, completed=done, total=total, speed=speed)

        written = generate_file(llm, input_file, output_file, sampling, show)
    typer.echo(f"wrote {written} results to {output_file}", err=True)
