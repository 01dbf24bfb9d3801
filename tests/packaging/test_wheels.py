"""Test the wheels and the source distribution in dist/; `make wheels` builds them and runs these tests."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.native.processor import vector_level

ROOT = Path(__file__).parents[2]
CORE = ROOT / "farandole" / "native"
MACHINES = ("x86_64", "aarch64")

pytestmark = pytest.mark.slow


def run(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
    return done


def distribution(pattern: str) -> Path:
    found = sorted((ROOT / "dist").glob(pattern))
    if not found:
        pytest.skip(f"no dist/{pattern}: run make wheels")
    return found[-1]


def install(package: Path, folder: Path, **variables: str) -> tuple[Path, dict[str, str]]:
    """Install a distribution without a compiler on the path; return the folder of commands and the environment."""
    run([sys.executable, "-m", "venv", folder / "venv"], folder)
    commands = folder / "venv" / "bin"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PATH": str(commands), "HOME": str(folder), **variables}
    options = ["--no-compile", "--disable-pip-version-check", "--constraint", ROOT / "constraints.txt"]
    run([commands / "pip", "install", *options, package], folder, environment | {"HOME": os.environ["HOME"]})
    return commands, environment


@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_suits_every_python_and_glibc_2_28(machine: str) -> None:
    wheel = distribution(f"*_{machine}.whl")
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    shown = run([sys.executable, "-m", "auditwheel", "show", wheel], ROOT).stdout.replace("\n", " ")
    tag = re.search(rf'platform tag: "manylinux_2_(\d+)_{machine}"', shown)
    assert tag is not None, shown
    assert int(tag[1]) <= 28


@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_contains_exactly_the_files_of_the_package(machine: str) -> None:
    with zipfile.ZipFile(distribution(f"*_{machine}.whl")) as wheel:
        names = wheel.namelist()
    tracked = run(["git", "ls-files", "farandole"], ROOT).stdout.split()
    shipped = {name for name in tracked if not name.endswith((".c", ".h", ".inc"))}
    assert {name for name in names if ".dist-info/" not in name} == shipped | {
        "farandole/native/_core.so",
        "farandole/troubleshooting.md",
    }


def test_a_wheel_needs_no_compiler(tmp_path: Path) -> None:
    """Run the first program of the README on two ranks with shared memory."""
    commands, environment = install(distribution(f"*_{platform.machine()}.whl"), tmp_path)
    assert shutil.which("gcc", path=environment["PATH"]) is None
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert program is not None
    (tmp_path / "first.py").write_text(program[1])
    run([commands / "farandole", "launch", "-n", "2", "first.py"], tmp_path, environment)
    assert "RankDied" in run([commands / "farandole", "explain", "rankdied"], tmp_path, environment).stdout
    core = "from farandole import native; print(native.why_unavailable(), native.vector_level().name)"
    found = run([commands / "python", "-c", core], tmp_path, environment).stdout
    assert found.split() == ["None", vector_level().name]


def test_the_source_installs_without_a_compiler(tmp_path: Path) -> None:
    """Ranks communicate through Gloo, and the program prints the reason."""
    commands, environment = install(distribution("*.tar.gz"), tmp_path)
    (tmp_path / "sum.py").write_text(
        "import torch, torch.distributed as dist\nfrom farandole import native\n"
        "dist.init_process_group('farandole')\ntotal = torch.ones(3)\ndist.all_reduce(total)\n"
        "print(total.tolist(), native.why_unavailable())\n"
    )
    said = run([commands / "farandole", "launch", "-n", "2", "sum.py"], tmp_path, environment).stdout
    assert "[2.0, 2.0, 2.0]" in said
    assert "install a C compiler" in said


def test_the_core_of_aarch64_under_load(tmp_path: Path) -> None:
    """Compare random operations of 4 ranks on 2 hosts with a reference, in an emulator (Debian: qemu-user)."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("qemu-aarch64 is not installed (Debian: apt install qemu-user)")
    sources = [*sorted(CORE.glob("*.c")), ROOT / "tests" / "native" / "stress_core.c"]
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static"]
    run([*compiler, "-O2", "-std=gnu11", f"-I{CORE}", *sources, "-o", tmp_path / "stress"], tmp_path)
    assert (
        "operations of 4 ranks" in run([emulator, tmp_path / "stress", "4", "2", "10", "2"], tmp_path).stdout
    )
