"""The Python programs and the command lines of the documentation run.

A page's Python blocks form one program, in order, on 2 ranks.  Comments in the page, which readers do not see, can
change this:

    <!-- setup ... -->                   code that the next blocks need
    <!-- program: NAME, ranks: N -->     the next block is a program of its own
    <!-- not run: REASON -->             the next block is not run

The first two comments accept `, launcher: mpiexec`.  The second also accepts `, prints the same as: NAME`, where NAME
is an earlier program of the page.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import typer

from farandole._extras import EXTRAS, NEEDED_BY_COMMAND
from tests.docs.prose import ROOT, tracked
from tests.forked_python import ForkedPython
from tests.launch.jobs import Job, finish

BLOCK = re.compile(
    r"<!-- setup(?:, launcher: (?P<page_launcher>\w+))?\n(?P<setup>.*?)-->"
    r"|(?:<!-- program: (?P<name>\S+), ranks: (?P<ranks>\d+)(?:, launcher: (?P<launcher>\w+))?"
    r"(?:, prints the same as: (?P<same>\S+))? -->\s*|<!-- not run: (?P<skipped>[^\n]*) -->\s*)?"
    r"^```python\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^\$ (farandole(?:-horovodrun)?(?: (?:[^#\n\\]|\\\n)*)?)", re.MULTILINE)
PAGES = [path.relative_to(ROOT) for path in tracked("README.md", "docs/*.md")]


@dataclass(frozen=True)
class Program:
    """A program of a page, its number of ranks, and the earlier program that prints the same."""

    page: Path
    name: str
    code: str
    ranks: int = 2
    launcher: str = ""
    same: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.name}" if self.name else str(self.page)


def programs() -> Iterator[Program]:
    for page in PAGES:
        joined: list[str] = []
        launcher = ""
        for number, block in enumerate(BLOCK.finditer((ROOT / page).read_text())):
            if block["name"]:
                options = {name: block[name] or "" for name in ("launcher", "same")}
                yield Program(page, block["name"], block["code"], int(block["ranks"]), **options)
            elif block["skipped"]:
                yield Program(page, f"block {number}", block["code"], skipped=block["skipped"])
            else:
                joined.append(block["setup"] or block["code"])
                launcher = block["page_launcher"] or launcher
        if joined:
            yield Program(page, "", "\n".join(joined), launcher=launcher)


@functools.cache
def output_of(program: Program) -> str:
    """Run a program, and return what its ranks print."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(program.code)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        job: Job
        if program.launcher == "mpiexec":
            mpiexec = Path(sys.executable).with_name("mpiexec")
            command = [str(mpiexec), "-n", str(program.ranks), sys.executable, "program.py"]
            job = subprocess.Popen(command, cwd=folder, env=environment, stdout=PIPE, stderr=PIPE, text=True)
        else:
            launch = ["-m", "farandole", "launch", "--ranks", str(program.ranks), "program.py"]
            fork_ranks = program.page != Path(
                "README.md"
            )  # a reader's first program runs as a reader runs it
            job = ForkedPython(launch, environment, folder, fork_ranks=fork_ranks)
        status, out, err = finish(job)
    assert status == 0, out[-2000:] + err[-4000:]
    return out


@pytest.mark.parametrize("program", list(programs()), ids=str)
def test_a_program_runs(program: Program) -> None:
    if program.skipped:
        compile(program.code, str(program), "exec")
        pytest.skip(program.skipped)
    output = output_of(program)
    if program.same:
        (other,) = (one for one in programs() if (one.page, one.name) == (program.page, program.same))
        assert output, "the program prints nothing"
        assert output == output_of(other)


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` for an expression of names, or ""."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_programs_import_the_modules_that_they_use() -> None:
    """The ranks above are forked with many modules loaded, so they do not notice a missing import."""
    code = "import sys, torch, torch.distributed, farandole; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "torch.nn" in loaded
    assert "torch.distributed.checkpoint" not in loaded
    for program in programs():
        tree = ast.parse(program.code)
        names = set(_imports(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (name := _dotted(node)) in sys.modules:
                found = name in loaded or any(f"{each}.".startswith(f"{name}.") for each in names)
                assert found, f"{program}: {name} is not imported"


def test_python_code_is_in_blocks_that_run() -> None:
    for page in PAGES:
        found = re.search(r"^```(py|python3|pycon|ipython)$", (ROOT / page).read_text(), re.MULTILINE)
        assert not found, f"{page}: use the language python, with a comment if the block is not run"


def test_programs_that_print_the_same_are_marked() -> None:
    """A page that says that programs print the same compares their output."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        if re.search(r"prints? the same (losses|values)", text):
            assert "prints the same as: " in text, page


def command_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, match in enumerate(COMMAND.finditer((ROOT / page).read_text())):
            yield f"{page}:{number}", match[1].strip()


@pytest.mark.parametrize("line", [pytest.param(line, id=name) for name, line in command_lines()])
def test_a_command_line_is_valid(line: str) -> None:
    """Its command and options exist; for training, also its keys."""
    from farandole.cli.main import app

    command: Any = typer.main.get_command(app)
    program, *words = shlex.split(line.replace("\\\n", " "))
    if program == "farandole-horovodrun":
        words.insert(0, "launch")
    while hasattr(command, "commands") and words:
        name, *words = words
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_context(command.name, list(words))  # raises for an unknown option
    keys = [word for word in words if re.fullmatch(r"[a-z_.]+=\S+", word)]
    if command.name in ("train", "plan") and keys:
        from farandole.train.config import load_config

        load_config("default", [key for key in keys if not key.startswith(("options.", "task="))])


def test_the_quick_start_installs_the_extras_of_its_commands() -> None:
    text = (ROOT / "docs/quick-start.md").read_text()
    found = re.search(r"pip install 'farandole\[(.*)\]'", text)
    assert found
    installed = {module for extra in found[1].split(",") for module in EXTRAS[extra]}
    for line in COMMAND.findall(text):
        assert installed.issuperset(NEEDED_BY_COMMAND.get(line.split()[1], ())), line


@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md"])
def test_an_installation_starts_with_an_environment_and_explains_the_size_of_torch(page: str) -> None:
    before, _, after = (ROOT / page).read_text().partition("pip install 'farandole[")
    assert "python3 -m venv .venv && . .venv/bin/activate" in before
    assert "CUDA libraries" in after and "https://pytorch.org/get-started/locally/" in after
