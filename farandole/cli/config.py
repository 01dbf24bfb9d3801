"""The command `farandole config`: show a training configuration, list its keys, or explain a key."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from farandole.cli.mistakes import Command, CommandGroup

app = typer.Typer(
    cls=CommandGroup,
    help="Show a training configuration, list its keys, or explain a key.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


def complete_words(incomplete: str) -> list[str]:
    """Return the shell completions of `incomplete`: presets, and keys with "=" appended."""
    from farandole.train.config import known_keys, presets

    words = [*presets(), *(f"{key}=" for key in known_keys())]
    return [word for word in words if word.startswith(incomplete)]


def complete_keys(incomplete: str) -> list[str]:
    """Return the keys that begin with `incomplete`; used for shell completion."""
    from farandole.train.config import known_keys

    return [key for key in known_keys() if key.startswith(incomplete)]


@app.command(cls=Command)
def show(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PRESET|FILE|KEY=VALUE",
            help="The same arguments as for farandole train.",
            show_default=False,
            autocompletion=complete_words,
        ),
    ] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Show only keys that differ from the default preset.")
    ] = False,
) -> None:
    """Print, as TOML, the configuration that farandole train would use.

    \b
      farandole config show tiny steps=100 > my.toml
      farandole config show runs/stdlib-20260102-030405/config.toml --changed
    """
    from farandole.train.config import ConfigError, load_config, to_toml
    from farandole.train.start import read_request

    try:
        request = read_request(words or [], resume=False)
        config = load_config(request.source, request.overrides)
    except ConfigError as refusal:
        _refuse("show", refusal)
    values = config.flat()
    if changed:
        default = load_config().flat()
        values = {key: value for key, value in values.items() if default.get(key) != value}
    typer.echo(to_toml(values), nl=False)


@app.command(cls=Command)
def keys(
    section: Annotated[
        str | None,
        typer.Argument(help="List only the keys in this section, such as plan.", show_default=False),
    ] = None,
) -> None:
    """List all keys with their defaults and descriptions.

    \b
      farandole config keys
      farandole config keys optimizer
    """
    from rich.console import Console
    from rich.table import Table

    from farandole.train.config import ConfigError
    from farandole.train.keys import all_keys

    found = [key for name, key in all_keys().items() if section is None or name.startswith(f"{section}.")]
    if not found:
        sections = dict.fromkeys(name.partition(".")[0] for name in all_keys() if "." in name)
        _refuse("keys", ConfigError(f"unknown section {section}; sections are {', '.join(sections)}"))
    table = Table.grid("", "", padding=(0, 2))
    for key in found:
        table.add_row(key.assignment, key.description)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


@app.command(cls=Command)
def explain(
    key: Annotated[
        str, typer.Argument(help="A key, such as optimizer.learning_rate.", autocompletion=complete_keys)
    ],
) -> None:
    """Explain a key.

    The command prints the key's description, type, limits and default, and whether the key can be changed when a run is
    resumed.

    \b
      farandole config explain plan.zero
      farandole config explain learning_rate
    """
    import json

    from farandole.train.config import ConfigError
    from farandole.train.keys import find_key, preset_values
    from farandole.train.start import CHANGEABLE

    try:
        found = find_key(key)
    except ConfigError as refusal:
        _refuse("explain", refusal)
    others = ", ".join(f"{json.dumps(value)} in {name}" for name, value in preset_values(found.name).items())
    typer.echo(found.name)
    for name, text in (
        ("description", found.description),
        ("type", found.type),
        ("default", json.dumps(found.default) + (f"; {others}" if others else "")),
        ("--resume", "can change it" if found.name.startswith(CHANGEABLE) else "cannot change it"),
    ):
        typer.echo(f"  {name:<13} {text}")


def _refuse(command: str, refusal: Exception) -> NoReturn:
    typer.echo(f"farandole config {command}: {refusal}", err=True)
    raise typer.Exit(2)
