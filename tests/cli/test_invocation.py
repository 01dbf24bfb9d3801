"""Suggested commands name `farandole` as in the command that prints them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SAY = "from farandole.cli.invocation import command\nprint(command('train', '--resume', 'my runs'))\n"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script `bin/farandole`, as pip installs it, and a package to run with -m."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "farandole"
    script.write_text(f"#!{sys.executable}\n{SAY}")
    script.chmod(0o755)
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "__main__.py").write_text(SAY)
    return tmp_path


def _said(folder: Path, path: str, *command: str) -> str:
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return run.stdout


def test_a_command_can_be_typed_as_it_is_printed(folder: Path) -> None:
    on_path = f"{folder / 'bin'}:{os.environ['PATH']}"
    words = "train --resume 'my runs'\n"
    assert _said(folder, on_path, "farandole") == f"farandole {words}"
    assert _said(folder, "/usr/bin:/bin", "bin/farandole") == f"bin/farandole {words}"
    assert _said(folder, on_path, sys.executable, "-m", "module") == f"{sys.executable} -m farandole {words}"
    assert _said(folder, on_path, sys.executable, "-c", SAY) == f"farandole {words}"
