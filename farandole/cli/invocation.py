"""Format farandole commands that the user can paste into a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def command(*words: str) -> str:
    """Return the shell command that runs `farandole` with the arguments `words`.

    The command starts farandole in the same way as this process was started: by name, by path
    (`.venv/bin/farandole`) or as a module (`python -m farandole`).
    """
    return shlex.join([*_program(), *words])


def _program() -> list[str]:
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return [sys.orig_argv[0], "-m", "farandole"]
    if script.stem != "farandole":  # called from Python
        return ["farandole"]
    on_path = shutil.which("farandole")
    if on_path is not None and os.path.samefile(on_path, script):
        return ["farandole"]
    return [sys.argv[0]]
