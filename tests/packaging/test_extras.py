"""Test the package without its optional dependencies, and the messages for missing extras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farandole._extras import EXTRAS

WITHOUT_EXTRAS = f"""
import sys
for name in {[module for modules in EXTRAS.values() for module in modules]}:
    sys.modules[name] = None  # an import raises ModuleNotFoundError
"""
CORE = """
import farandole, farandole.bench.training, farandole.cli.main, farandole.comm, farandole.horovod.torch, farandole.launch
import farandole.memory, farandole.models.gpt, farandole.parallel.lora, farandole.parallel.parameter_server, farandole.planner
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_EXTRAS + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_the_core_needs_torch_and_numpy(tmp_path: Path) -> None:
    done = run(CORE, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["train", "plan gpt2-small", "generate runs"])
def test_a_command_names_the_missing_extra(command: str, tmp_path: Path) -> None:
    code = f"sys.argv[1:] = {command.split()}; from farandole.cli.main import main; main()"
    done = run(code, tmp_path)
    assert done.returncode == 1
    assert "is not installed: pip install 'farandole[train]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("serve runs", "fastapi", "serve"),
        ("generate runs", "tokenizers", "train"),
        ("train", "tensorboard", "train"),
    ],
)
def test_a_missing_extra_is_reported_before_slow_imports(
    command: str, module: str, extra: str, tmp_path: Path
) -> None:
    code = f"""
import sys
sys.modules[{module!r}] = sys.modules["torch"] = None
from farandole.cli.main import main
main({command.split()})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert f"{module} is not installed: pip install 'farandole[{extra}]'" in done.stderr


def test_an_import_names_the_missing_extra(tmp_path: Path) -> None:
    done = run("import farandole.parallel.lora.peft_adapter", tmp_path)
    assert "safetensors is not installed: pip install 'farandole[train]'" in done.stderr.splitlines()[-1]
