"""Horovod's module names, so that a script that imports `horovod.torch` runs as it is.

    python -m farandole.horovod.shim script.py --its arguments
    farandole launch -n 2 -m farandole.horovod.shim script.py --its arguments
    mpirun -n 2 python -m farandole.horovod.shim -m package.module

`horovod.x` is `farandole.horovod.x`: the same module object, whichever name it is imported by.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OURS = "farandole.horovod"


class HorovodFinder(MetaPathFinder):
    """Finds `horovod` and what is in it among our modules; ImportError for what is not there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module that stands for a name of Horovod's, None for other names."""
        if fullname != "horovod" and not fullname.startswith("horovod."):
            return None
        ours = _OURS + fullname.removeprefix("horovod")
        if importlib.util.find_spec(ours) is None:
            there = [
                name
                for name in ("torch", "tensorflow", "keras")
                if importlib.util.find_spec(f"{_OURS}.{name}")
            ]
            raise ModuleNotFoundError(
                f"{fullname} is not there: farandole has no {ours}; it has "
                f"{', '.join(f'horovod.{name}' for name in there)}",
                name=fullname,
            )
        return ModuleSpec(fullname, _SameModule(ours), is_package=True)


class _SameModule(Loader):
    """Loads a module by giving out another one that exists under its own name."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put Horovod's in its place


def install() -> None:
    """Make `import horovod.torch` find our modules, before a Horovod that may be installed."""
    if not any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HorovodFinder())


def main(arguments: list[str]) -> None:
    """Run a script or, after -m, a module, as Python would."""
    is_module = arguments[:1] == ["-m"]
    program = arguments[int(is_module) :]
    if not program or program[0].startswith("-"):
        sys.exit("usage: python -m farandole.horovod.shim [-m] SCRIPT_OR_MODULE [ARGUMENTS...]")
    install()
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
