"""Hooks of the documentation site: links to files of the repository, and the help texts of the command line."""

from __future__ import annotations

import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:farandole|labs|benchmarks|tests|README)[^)]*)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/ by their names, and the marker of the command line by help texts."""
    markdown = LINK.sub(
        lambda match: match[1] if "`" in match[1] else f"`{match[2].replace('../', '')}`", markdown
    )
    return (
        markdown.replace("<!-- help texts -->", help_texts())
        if "<!-- help texts -->" in markdown
        else markdown
    )


def help_texts() -> str:
    """Return the help text of every command, as a section each."""
    import typer

    from farandole.cli.main import app

    sections = []

    def describe(command: Any, name: str) -> None:
        context = command.context_class(command, info_name=name, max_content_width=80, terminal_width=80)
        sections.append(f"## {name}\n\n```\n{command.get_help(context)}\n```\n")
        for each, sub in getattr(command, "commands", {}).items():
            describe(sub, f"{name} {each}")

    describe(typer.main.get_command(app), "farandole")
    return "\n".join(sections)
