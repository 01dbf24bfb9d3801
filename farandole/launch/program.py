"""The program that a job runs, and a check that the program exists.

The check finds a module as `python -m` would, but does not import the module or its parent packages.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from shutil import which
from typing import Literal

from farandole._troubleshooting import see
from farandole.launch.monitor import STOP_TIMEOUT_S
from farandole.launch.placement import LaunchError

PYTHON = re.compile(r"python(\d(\.\d+)?)?")
Kind = Literal["script", "module", "command"]


@dataclass(frozen=True)
class Program:
    """A script, a module or a command, with its arguments and the settings of its ranks."""

    target: str
    arguments: Sequence[str] = ()
    kind: Kind = "script"
    pin: bool = True
    """Whether each rank is pinned to its own cores."""
    threads: int | None = None
    """The number of threads per rank; None divides the cores by the number of ranks."""
    output: str | None = None
    """The folder for the output of the ranks, with a subfolder per rank; None prints the output."""
    verbose: bool = False
    """Whether to print a line for each process that is started."""
    max_restarts: int = 0
    """The maximum number of times that all ranks are restarted after a failure."""
    stop_timeout_s: float = STOP_TIMEOUT_S
    """How long, in seconds, ranks may run after a signal to the launcher before they are killed."""
    quiet: bool = False
    """Whether to omit the line that describes the division of the cores."""
    shim: str | None = None
    """A module whose function `install` each rank calls before it runs the script or module."""

    def check(self) -> None:
        """Raise `LaunchError` if the script, module or command does not exist."""
        if self.kind == "module":
            _check_module(self.target)
        elif self.kind == "command":
            if which(self.target) is None:
                raise LaunchError(
                    f"there is no command {self.target!r}; for a Python script, omit --no-python"
                )
        else:
            _check_script(Path(self.target), self.target)


def without_python(words: Sequence[str]) -> tuple[Kind, Sequence[str]]:
    """Remove `python` and its options `-u` and `-m` from a command line, if present.

    Returns:
        The kind of the program, and the remaining words: the script or module, and its arguments.

    Raises:
        LaunchError: if `python` is not the interpreter of the launcher, or is not followed by a script or a module.
    """
    name = Path(words[0]).name
    if not PYTHON.fullmatch(name) or Path(words[0]).suffix == ".py":
        return "script", words
    if not _is_own_python(words[0]):
        raise LaunchError(
            f"ranks run with the launcher's Python interpreter ({sys.executable}), not with {words[0]}; "
            f"omit {words[0]}, or write --no-python {words[0]} ..."
        )
    rest = list(words[1:])
    while rest[:1] == ["-u"]:  # ranks write their output line by line anyway
        rest.pop(0)
    kind: Kind = "script"
    if rest[:1] == ["-m"]:
        kind = "module"
        rest.pop(0)
    if not rest:
        raise LaunchError(
            f"{words[0]} is not followed by a script or a module; use farandole launch {name} script.py"
        )
    if rest[0].startswith("-"):
        raise LaunchError(
            f"{words[0]} {rest[0]}: Python options are not supported; write --no-python {words[0]} {rest[0]} ..."
        )
    return kind, rest


def _is_own_python(word: str) -> bool:
    """Return whether `word` is `python`, or the path of an interpreter in the environment of this process."""
    major, minor = sys.version_info[:2]
    path = Path(word)
    if path.name not in ("python", f"python{major}", f"python{major}.{minor}"):
        return False
    return path.name == word or _environment(path) == _environment(Path(sys.executable))


def _environment(python: Path) -> Path:
    """Return the folder of the interpreter's virtual environment, or the interpreter itself if there is none."""
    # The interpreter does not identify its virtual environment, because environments usually link to the same file.
    folder = python.absolute().parent.parent
    return folder.resolve() if (folder / "pyvenv.cfg").is_file() else python.resolve()


def _check_script(path: Path, target: str) -> None:
    if path.is_file():
        return
    if path.is_dir():
        if (path / "__main__.py").is_file():
            raise LaunchError(
                f"{target!r} is a package, not a script; launch the package with -m {path.name}"
            )
        scripts = sorted(str(p) for p in path.glob("*.py"))
        hint = f"; scripts in it: {', '.join(scripts[:4])}" if scripts else ""
        raise LaunchError(f"{target!r} is a folder, not a script{hint}")
    if not path.parent.is_dir():
        raise LaunchError(
            f"there is no script {target!r}: folder {str(path.parent)!r} does not exist; check the path{see('there-is-no-script')}"
        )
    siblings = {p.name: p for p in path.parent.glob("*.py")}
    nearest = difflib.get_close_matches(path.name, siblings, 1)
    hint = f"; nearest: {siblings[nearest[0]]}" if nearest else ""
    place = "here" if path.parent == Path(".") else f"in {path.parent}"
    command = which(target)
    other = f"to launch the command {command}, use --no-python" if command else "to launch a module, use -m"
    raise LaunchError(f"there is no script {target!r} {place}{hint}; {other}{see('there-is-no-script')}")


def _check_module(target: str) -> None:
    found = _find(target)
    if found is None:
        script = Path(target if target.endswith(".py") else f"{target.replace('.', '/')}.py")
        hint = f"; to launch the script {script}, omit -m" if script.is_file() else ""
        raise LaunchError(f"there is no module {target!r} for this Python ({sys.executable}){hint}")
    if found.submodule_search_locations is not None and _find_in(found, "__main__") is None:
        raise LaunchError(
            f"{target!r} is a package without a {target}.__main__ module to run; choose one of its modules"
        )


def _find(name: str) -> ModuleSpec | None:
    first, *rest = name.split(".")
    found = PathFinder.find_spec(first, [os.getcwd(), *sys.path]) or _find_installed(first)
    for part in rest:
        found = found and _find_in(found, part)
    return found


def _find_in(package: ModuleSpec, name: str) -> ModuleSpec | None:
    folders = package.submodule_search_locations
    # Pass only the last part of the name: for a dotted name, Python would import the parent packages.
    return None if folders is None else PathFinder.find_spec(name, list(folders))


def _find_installed(name: str) -> ModuleSpec | None:
    """Find a module with the finders in `sys.meta_path`, which support editable installations."""
    try:
        return importlib.util.find_spec(name) if name else None
    except ValueError:  # the module is loaded but has no spec
        return None
