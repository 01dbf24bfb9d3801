"""The C core compiles without a warning: with GCC and Clang, for x86 and for Arm, with or without Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from farandole import native

SOURCES = sorted(Path(native.__file__).parent.glob("*.c"))
FLAGS = ["-O1", "-std=gnu11", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fPIC", "-pthread", "-shared"]


@pytest.mark.parametrize("compiler", ["gcc", "clang", "aarch64-linux-gnu-gcc"])
def test_compiles_without_a_warning(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(tmp_path / "core.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_exports_only_the_interface() -> None:
    if shutil.which("nm") is None or (path := native._path()) is None:
        pytest.skip("needs nm and the compiled core")
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
    assert {line.split()[-1] for line in listed.stdout.splitlines()} == set(native._SIGNATURES)


def test_a_core_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    (tmp_path / "old.c").write_text("int frd_abi(void) { return 1; }")
    core = tmp_path / "old.so"
    subprocess.run(["gcc", "-shared", "-fPIC", tmp_path / "old.c", "-o", core], check=True)
    monkeypatch.setattr(native, "_path", lambda: core)
    with pytest.raises(OSError, match=rf"expected interface version {native.ABI}, got version 1; reinstall"):
        native.library.__wrapped__()


def test_depends_only_on_the_c_library() -> None:
    """No torch, no MPI and no Python headers."""
    allowed = {path.name for path in Path(native.__file__).parent.iterdir()}
    for path in [*SOURCES, *Path(native.__file__).parent.glob("*.h")]:
        for line in path.read_text().splitlines():
            if line.startswith('#include "'):
                assert line.split('"')[1] in allowed, f"{path.name}: {line}"
            elif line.startswith("#include <"):
                assert not any(word in line for word in ("Python", "torch", "mpi", "omp")), (
                    f"{path.name}: {line}"
                )
