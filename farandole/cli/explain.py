"""The command `farandole explain`: print the sections of the troubleshooting page that explain a message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

import typer

from farandole._troubleshooting import page
from farandole.cli.mistakes import nearest


def complete_sections(incomplete: str) -> list[str]:
    """Return the names of the sections that begin with `incomplete`; used for shell completion."""
    return [name for name in map(name_of, sections()) if name.startswith(incomplete)]


def explain(
    message: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MESSAGE",
            help="An error message or a part of it, or a name that a message ends with.  Without a message, list all "
            "explained messages.",
            show_default=False,
            autocompletion=complete_sections,
        ),
    ] = None,
) -> None:
    """Explain an error message or a warning from farandole.

    The command prints the causes of the message, and what to do.

    \b
      farandole explain                                     list the messages
      farandole explain rankdied
      farandole explain "rank 1 has waited 4 s in all_reduce"
    """
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.table import Column, Table

    console = Console(highlight=False, markup=False)
    if not message:
        table = Table.grid(Column(no_wrap=True), "", padding=(0, 2))
        for title, cause in causes().items():
            table.add_row(name_of(title), cause)
        console.print(table)
        return
    text, explained = " ".join(message), sections()
    found = matching(text, explained)
    if not found:
        names = nearest(name_of(text), list(map(name_of, explained)))
        hint = f"did you mean {' or '.join(names)}?" if names else "farandole explain lists all sections"
        typer.echo(f"farandole explain: no section explains {text!r}; {hint}", err=True)
        raise typer.Exit(2)
    for title in found:
        console.print(Markdown(f"## {title}\n\n{explained[title]}"))


def sections() -> dict[str, str]:
    """Return a dict that maps section titles of the troubleshooting page to section texts without links.

    Each title is a part of an error message or warning.
    """
    text = re.sub(r"\[(.+?)\]\([^)\s]+\)", r"\1", re.sub(r"\n## .*", "", page()))
    titled = (section.partition("\n") for section in text.split("\n### ")[1:])
    return {title.strip(): body.strip() for title, _, body in titled}


def causes() -> dict[str, str]:
    """Return a dict that maps each section title to the cause of the message, in one sentence."""
    rows = re.findall(r"^\| \[(.+?)\]\(#.+?\) \| (.+?) \|$", page(), re.MULTILINE)
    return {title: cause.replace("`", "") for title, cause in rows}


def name_of(title: str) -> str:
    """Return the anchor of the section `title`, which messages use as the section's name."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def matching(message: str, titles: Iterable[str]) -> list[str]:
    """Return the titles of sections named `message`; if there are none, return the titles that occur in `message`."""
    named = [title for title in titles if name_of(title) == name_of(message)]
    return named or [title for title in titles if title.lower() in message.lower()]
