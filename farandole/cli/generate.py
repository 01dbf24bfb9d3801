"""The command `farandole generate`: generate text with a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a run, or a folder of runs.")
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The beginning of the text.")] = "def",
    tokens: Annotated[int, typer.Option("--tokens", "-t", min=1, help="Number of tokens to generate.")] = 200,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Values below 1 are less random, above 1 more random.  0: always choose the most likely token.",
        ),
    ] = 0.7,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="Sample from the N most likely tokens.  0: from all tokens.")
    ] = 50,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed.  The same seed generates the same text.")
    ] = 0,
) -> None:
    """Continue a prompt with a trained model, and print the text.

    For a run or a folder of runs, the command uses the newest checkpoint.

    \b
      farandole generate runs/stdlib-20260102-030405 --prompt "class Queue:"
      farandole generate runs --prompt "import" --tokens 400 --temperature 1 --seed 7
    """
    # import here, so that `--help` does not wait for torch
    from farandole.train.config import ConfigError
    from farandole.train.run_folder import CheckpointError, newest_checkpoint

    try:
        chosen = newest_checkpoint(checkpoint)

        from farandole.models.generate import generate as tokens_after
        from farandole.train.text import load_model

        model, tokenizer, config = load_model(chosen)
    except (CheckpointError, ConfigError) as refusal:
        typer.echo(f"farandole generate: {refusal}", err=True)
        raise typer.Exit(2) from None
    given = tokenizer.encode(prompt).ids
    if not given:
        typer.echo("farandole generate: the prompt is empty; expected at least one character", err=True)
        raise typer.Exit(2)
    if chosen != checkpoint:
        typer.echo(f"from {chosen}", err=True)
    written = list(given)
    shown = ""
    for token in tokens_after(
        model, given, tokens, context=config.model.context, temperature=temperature, top_k=top_k, seed=seed
    ):
        written.append(token)
        text = tokenizer.decode(written)
        if text.endswith("�"):  # the last character is incomplete
            continue
        sys.stdout.write(text[len(shown) :])
        sys.stdout.flush()
        shown = text
    sys.stdout.write("\n")
