"""Install `farandole.horovod` under Horovod's module names, so that Horovod scripts run unchanged.

    python -m farandole.horovod.shim script.py ARGUMENTS
    farandole launch -n 2 -m farandole.horovod.shim script.py ARGUMENTS
    farandole-horovodrun -np 2 python script.py ARGUMENTS
    mpirun -n 2 python -m farandole.horovod.shim -m package.module

`horovod.x` is an alias for the module `farandole.horovod.x`.  `_MODULES` lists the exceptions.
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

from farandole.launch.child import run_script

_OURS = "farandole.horovod"
_IMPORT_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_import_path")

_MODULES = {
    "horovod.common": "",
    "horovod.common.basics": ".basics",
    "horovod.common.elastic": ".elastic",
    "horovod.common.exceptions": ".torch",
    "horovod.common.process_sets": ".process_sets",
    "horovod.common.util": ".basics",
    "horovod.torch.compression": ".compression",
    "horovod.torch.mpi_ops": ".torch",
    "horovod.torch.elastic.sampler": ".torch.elastic",
    "horovod.torch.elastic.state": ".torch.elastic",
    "horovod.tensorflow.compression": ".compression",
    "horovod.tensorflow.keras.callbacks": ".tensorflow.callbacks",
    "horovod.tensorflow.mpi_ops": ".tensorflow",
    "horovod.tensorflow.util": ".tensorflow.functions",
    "horovod.keras.callbacks": ".tensorflow.callbacks",
}
"""Maps Horovod modules to counterparts with a different name.

The counterparts' names are relative to `farandole.horovod`.
"""


class HorovodFinder(MetaPathFinder):
    """Imports `horovod` and its submodules from `farandole.horovod`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a Horovod module, or None for other modules.

        Raises:
            ModuleNotFoundError: if the Horovod module has no counterpart in `farandole.horovod`.
        """
        if fullname != "horovod" and not fullname.startswith("horovod."):
            return None
        ours = _OURS + _MODULES.get(fullname, fullname.removeprefix("horovod"))
        if not _exists(ours):
            provided = ", ".join(f"horovod.{name}" for name in ("torch", "tensorflow", "keras"))
            raise ModuleNotFoundError(
                f"farandole does not provide {fullname}; it provides {provided}", name=fullname
            )
        return ModuleSpec(fullname, _AliasLoader(ours), is_package=True)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent is not a package
        return False


class _AliasLoader(Loader):
    """Loads a module under another name."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # restore the spec that the import system has replaced with the alias's spec
        module.__spec__ = self._spec


def install() -> None:
    """Make `import horovod.torch` import `farandole.horovod.torch`, even if Horovod is installed."""
    if not any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HorovodFinder())
    if _IMPORT_PATH not in sys.path:
        sys.path.insert(1, _IMPORT_PATH)  # for spawned processes, which inherit only the path


def main(arguments: list[str]) -> None:
    """Run a script (or a module, with `-m`) as `python` does.

    Args:
        arguments: The script's path or `-m MODULE`, followed by the program's arguments.
    """
    is_module = arguments[:1] == ["-m"]
    program = arguments[int(is_module) :]
    if not program or program[0].startswith("-"):
        sys.exit("usage: python -m farandole.horovod.shim [-m] SCRIPT_OR_MODULE [ARGUMENTS...]")
    install()
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        run_script(os.path.abspath(program[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
