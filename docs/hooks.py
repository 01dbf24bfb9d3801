"""Hooks for the documentation site.

They replace links to repository files, insert help texts and tables of the command line, and check that the built site
works without a network.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[1]

DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")
MARKER = "<!-- help texts -->"
OPTIONS = re.compile(r"<!-- options of (\w+) -->")
REMOTE = re.compile(r"(?:https?:)?//")
REMOTE_IN_STYLES = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/ with file names, and the markers with help texts and tables of options."""
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
    markdown = OPTIONS.sub(lambda marker: options_table(marker[1]), markdown)
    return markdown.replace(MARKER, help_texts()) if MARKER in markdown else markdown


def options_table(launcher: str) -> str:
    """Return a table of the launcher's options, with their meaning in `farandole launch` or the alternative."""
    import typer

    from farandole.cli import launcher_options
    from farandole.cli.main import app

    command: Any = typer.main.get_command(app).commands["launch"]  # type: ignore[attr-defined]
    help_of = {name: getattr(param, "help", "") for param in command.params for name in param.opts}
    help_of["--help"] = "Show the help text."
    rows: dict[str, list[str]] = {}
    for name, alternative in getattr(launcher_options, launcher.upper()).items():
        rows.setdefault(help_of[name] if alternative is None else f"rejected: {alternative}", []).append(name)
    lines = [f"| {', '.join(f'`{name}`' for name in names)} | {text} |" for text, names in rows.items()]
    return "\n".join(["| option | meaning, or alternative |", "| --- | --- |", *lines])


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


@event_priority(-200)  # after the plugin `offline`, which writes the index as a script
def on_post_build(config: Any, **_: Any) -> None:
    """Check that the site in `config.site_dir` needs no other server: not for pages, and not for the search."""
    site = Path(config.site_dir)
    if not (site / "search" / "search_index.js").is_file():
        raise PluginError("search/search_index.js is missing: the search would not work without a server")
    found = [
        f"{path.relative_to(site)} loads {url}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for url in remote_resources(path.read_text(), styles=path.suffix == ".css")
    ]
    if found:
        raise PluginError("\n".join(["pages must not load anything from another server:", *found]))


def remote_resources(text: str, styles: bool = False) -> list[str]:
    """Return the URLs on other servers from which a page or a style sheet loads scripts, styles, fonts or pictures."""
    if styles:
        return REMOTE_IN_STYLES.findall(text)
    page = _Page()
    page.feed(text)
    return page.remote


class _Page(HTMLParser):
    """Collects the resources on other servers that a page loads; links in `a` elements do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            loaded = name in ("src", "data", "poster") or (name == "href" and tag == "link")
            if loaded and REMOTE.match(value or ""):
                self.remote.append(value or "")
            if name == "srcset":
                self.remote += [word for word in (value or "").split() if REMOTE.match(word)]
            if name == "style":
                self.remote += REMOTE_IN_STYLES.findall(value or "")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style":
            self.remote += REMOTE_IN_STYLES.findall(data)
