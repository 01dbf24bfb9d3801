"""Hooks for the documentation site: replace links to repository files, and insert help texts of the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]

DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")
MARKER = "<!-- help texts -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/ with file names, and the marker `MARKER` with help texts."""
    folder = (DOCS / page.file.src_uri).parent

    def name_of_file(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        if not target.exists():
            raise PluginError(
                f"{page.file.src_uri}: expected a link to an existing file, got {link[2]}; fix the link"
            )
        return link[1] if "`" in link[1] else f"`{target.relative_to(ROOT)}`"

    markdown = LINK.sub(name_of_file, markdown)
    return markdown.replace(MARKER, help_texts()) if MARKER in markdown else markdown


def help_texts() -> str:
    """Return the help texts of all commands, with one section per command."""
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
