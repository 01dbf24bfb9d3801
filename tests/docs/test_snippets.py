"""The Python programs and the command lines of the documentation run.

A page's Python blocks form one program, in order, on 2 ranks.  Comments in the page, which readers do not see, say otherwise:

    <!-- setup ... -->                   code that the next blocks need
    <!-- program: NAME, ranks: N -->     the next block is a program of its own

Both take `, launcher: mpiexec`.

Blocks of the language `py` are not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.docs.prose import ROOT, tracked

BLOCK = re.compile(
    r"<!-- setup(?:, launcher: (?P<page_launcher>\w+))?\n(?P<setup>.*?)-->"
    r"|(?:<!-- program: (?P<name>\S+), ranks: (?P<ranks>\d+)(?:, launcher: (?P<launcher>\w+))? -->\s*)?"
    r"^```python\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^\$ (farandole(?: (?:[^#\n\\]|\\\n)*)?)", re.MULTILINE)
PAGES = [path.relative_to(ROOT) for path in tracked("README.md", "docs/*.md")]


def programs() -> Iterator[tuple[str, str, int, str]]:
    """Yield the name, the code, the number of ranks and the launcher of each program."""
    for page in PAGES:
        joined: list[str] = []
        launcher = ""
        for block in BLOCK.finditer((ROOT / page).read_text()):
            if block["name"]:
                yield f"{page}:{block['name']}", block["code"], int(block["ranks"]), block["launcher"] or ""
            else:
                joined.append(block["setup"] or block["code"])
                launcher = block["page_launcher"] or launcher
        if joined:
            yield str(page), "\n".join(joined), 2, launcher


@pytest.mark.parametrize(
    ("code", "ranks", "launcher"), [pytest.param(*rest, id=name) for name, *rest in programs()]
)
def test_a_program_runs(code: str, ranks: int, launcher: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(code)
    ours = [sys.executable, "-m", "farandole", "launch", "--ranks", str(ranks), "program.py"]
    mpiexec = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks), sys.executable, "program.py"]
    done = subprocess.run(
        mpiexec if launcher == "mpiexec" else ours,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def command_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, match in enumerate(COMMAND.finditer((ROOT / page).read_text())):
            yield f"{page}:{number}", match[1].strip()


@pytest.mark.parametrize("line", [pytest.param(line, id=name) for name, line in command_lines()])
def test_a_command_line_is_valid(line: str) -> None:
    """Its command and options exist; for training, also its keys."""
    from farandole.cli.main import app

    command: Any = typer.main.get_command(app)
    words = shlex.split(line.replace("\\\n", " "))[1:]
    while hasattr(command, "commands") and words:
        name, *words = words
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_context(command.name, list(words))  # raises for an unknown option
    keys = [word for word in words if re.fullmatch(r"[a-z_.]+=\S+", word)]
    if command.name in ("train", "plan") and keys:
        from farandole.train.config import load_config

        load_config("default", [key for key in keys if not key.startswith(("options.", "task="))])
