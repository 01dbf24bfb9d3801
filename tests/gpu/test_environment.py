"""Packages that are carried as wheels to a machine without a network."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import environment
from benchmarks.gpu.environment import SetupError, dependencies, download_command, install, missing, name_of


def _wheel(folder: Path, name: str, source: str, version: str = "1.0") -> Path:
    """Write a wheel of one module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        record += f"{path},sha256={digest},{len(text)}\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for entry, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(entry, text)
    return path


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which wheels are installed during this test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    return tmp_path / "packages"


def test_wheels_are_installed_without_a_network(tmp_path: Path, target: Path) -> None:
    _wheel(tmp_path / "wheels", "carried_module", "VALUE = 42\n")
    _wheel(tmp_path / "wheels", "pytest", "raise AssertionError('the installed one counts')\n")
    assert missing(["carried_module>=1", "pytest"]) == ["carried-module"]
    assert install(tmp_path / "wheels", target) == ["carried-module"]
    assert missing(["carried_module>=1", "pytest"]) == []
    assert not (target / "pytest.py").exists()
    import carried_module  # type: ignore[import-not-found]

    assert carried_module.VALUE == 42
    code = "import carried_module; print(carried_module.VALUE)"  # child processes can import it, too
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "42\n"
    assert install(tmp_path / "wheels", target) == []


def test_an_older_package_is_replaced_for_the_checks(tmp_path: Path, target: Path) -> None:
    _wheel(tmp_path / "old", "carried_twice", "VALUE = 1\n")
    _wheel(tmp_path / "new", "carried_twice", "VALUE = 2\n", version="1.0.1")
    assert install(tmp_path / "old", tmp_path / "interpreter") == ["carried-twice"]
    assert install(tmp_path / "new", target) == ["carried-twice"]
    assert install(tmp_path / "old", target) == []
    code = "import carried_twice; print(carried_twice.VALUE)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "2\n"


def test_a_folder_without_wheels_is_refused(tmp_path: Path, target: Path) -> None:
    with pytest.raises(SetupError, match="expected wheels"):
        install(tmp_path, target)


def test_a_damaged_wheel_is_reported(tmp_path: Path, target: Path) -> None:
    (tmp_path / "damaged_module-1.0-py3-none-any.whl").write_bytes(b"nothing")
    with pytest.raises(SetupError, match="installing the wheels failed"):
        install(tmp_path, target)


def test_the_download_is_for_the_other_machine(tmp_path: Path) -> None:
    command = download_command(tmp_path, "3.12", ["torchao"])
    text = " ".join(command)
    assert "--python-version 3.12" in text and "--platform manylinux_2_28_x86_64" in text
    assert "--only-binary :all:" in text and command[-1] == "torchao"
    wanted = {name_of(each) for each in command}
    assert {"pydantic", "typer"} <= wanted
    assert not wanted & set(environment.PRESENT)


def test_names_of_requirements_and_wheels() -> None:
    assert name_of("pydantic>=2.7") == "pydantic"
    assert name_of("pydantic_core-2.50.4-cp312-cp312-manylinux_2_17_x86_64.whl") == "pydantic-core"
    assert "torch" in {name_of(each) for each in dependencies()}
