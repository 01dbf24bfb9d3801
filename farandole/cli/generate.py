"""`farandole generate`: text from a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a run, or a folder of runs.")
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What the text begins with.")] = "def",
    tokens: Annotated[int, typer.Option("--tokens", "-t", min=1, help="Tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Below 1 plainer, above 1 wilder; 0 takes the likeliest.")
    ] = 0.7,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw from so many likeliest; 0: all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
) -> None:
    """Print text that a trained model writes after a prompt.

    Of a run or a folder of runs the newest checkpoint is taken.

    \b
      farandole generate runs/stdlib-20260102-030405 --prompt "class Queue:"
      farandole generate runs --prompt "import" --tokens 400 --temperature 1 --seed 7
    """
    # Imports here and not above: `--help` need not wait for torch.
    from farandole.models.generate import generate as tokens_after
    from farandole.train.config import ConfigError
    from farandole.train.run_folder import CheckpointError, newest_checkpoint
    from farandole.train.text import load_model

    try:
        chosen = newest_checkpoint(checkpoint)
        model, tokenizer, config = load_model(chosen)
    except (CheckpointError, ConfigError) as refusal:
        typer.echo(f"farandole generate: {refusal}", err=True)
        raise typer.Exit(2) from None
    given = tokenizer.encode(prompt).ids
    if not given:
        typer.echo("farandole generate: the prompt is empty: give at least one character", err=True)
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
        if text.endswith("�"):  # a character whose bytes are not all there yet
            continue
        sys.stdout.write(text[len(shown) :])
        sys.stdout.flush()
        shown = text
    sys.stdout.write("\n")
