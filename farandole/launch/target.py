"""What is to be launched: a script or a module, and what to say where it is neither."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from farandole.launch.placement import LaunchError


def check_target(target: str, module: bool) -> None:
    """Raise `LaunchError` where there is no such script (or, with `module`, no such module) to run."""
    if module:
        _check_module(target)
    else:
        _check_script(Path(target), target)


def _check_script(path: Path, target: str) -> None:
    if path.is_file():
        return
    if path.is_dir():
        if (path / "__main__.py").is_file():
            raise LaunchError(
                f"{target!r} is a package, not a script; it is launched with -m: -m {path.name}"
            )
        scripts = sorted(str(p) for p in path.glob("*.py"))
        there = f"; scripts in it: {', '.join(scripts[:4])}" if scripts else ""
        raise LaunchError(f"{target!r} is a folder, not a script{there}")
    if not path.parent.is_dir():
        raise LaunchError(f"there is no script {target!r}: there is no folder {str(path.parent)!r}")
    siblings = {p.name: p for p in path.parent.glob("*.py")}
    nearest = difflib.get_close_matches(path.name, siblings, 1)
    hint = f"; nearest: {siblings[nearest[0]]}" if nearest else ""
    place = "here" if path.parent == Path(".") else f"in {path.parent}"
    raise LaunchError(f"there is no script {target!r} {place}{hint} (a module is launched with -m)")


def _check_module(target: str) -> None:
    found = _find(target)
    if found is None:
        script = Path(target if target.endswith(".py") else f"{target.replace('.', '/')}.py")
        hint = f"; the script {script} is launched without -m" if script.is_file() else ""
        raise LaunchError(f"there is no module {target!r} for this Python ({sys.executable}){hint}")
    if found.submodule_search_locations is not None and _find_in(found, "__main__") is None:
        raise LaunchError(
            f"{target!r} is a package without a module to run, {target}.__main__; name one of its modules"
        )


def _find(name: str) -> ModuleSpec | None:
    """Find a module as `python -m` in this folder would, but import nothing, not even the packages around it."""
    first, *rest = name.split(".")
    found = PathFinder.find_spec(first, [os.getcwd(), *sys.path]) or _find_installed(first)
    for part in rest:
        found = found and _find_in(found, part)
    return found


def _find_in(package: ModuleSpec, name: str) -> ModuleSpec | None:
    places = package.submodule_search_locations
    # by its last name alone: of a dotted one Python would ask for the package around it, which is not imported
    return None if places is None else PathFinder.find_spec(name, list(places))


def _find_installed(name: str) -> ModuleSpec | None:
    """What the other finders know, as those of editable installations."""
    try:
        return importlib.util.find_spec(name) if name else None
    except ValueError:  # it is loaded, and does not say from where
        return None
