"""Prepare a machine without a network: build the C core in place, and install packages from wheels.

python -m benchmarks.gpu wheels FOLDER --python 3.12     # with a network: download the wheels
make gpu WHEELS=FOLDER                                   # without a network: install missing packages and run
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARRIED = ROOT / "build" / "gpu-packages"
"""The folder in which wheels are installed; the interpreter's own packages are not changed."""
PRESENT = ("torch", "numpy", "safetensors", "tokenizers", "matplotlib")
"""Dependencies that are not downloaded, because a machine with a GPU is expected to have them."""
CHECKED = ("pydantic",)
"""Dependencies that some checks need and that are not in `PRESENT`."""
_KEPT = ("pip", "setuptools", "wheel")
"""Packages that are not replaced by a newer wheel."""
_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-pthread")


class SetupError(Exception):
    """Raised if the machine cannot be prepared; the message states the reason and a remedy."""


def dependencies(root: Path = ROOT) -> list[str]:
    """Return the package's requirements from pyproject.toml, including the extras `train` and `plot`."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(each for each in extras["train"] if "[" not in each), *extras["plot"]]


def name_of(requirement: str) -> str:
    """Return the normalized package name of a requirement or a wheel file."""
    name = re.split(r"[\s<>=!~;\[]", Path(requirement).name.split("-")[0], maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def is_installed(name: str) -> bool:
    """Return whether a distribution is installed."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def is_older(wheel: Path) -> bool:
    """Return whether an older version of a wheel's distribution is installed."""
    name = name_of(wheel.name)
    if name in PRESENT or name in _KEPT or not is_installed(name):
        return False
    return _numbers(importlib.metadata.version(name)) < _numbers(wheel.name.split("-")[1])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def missing(requirements: Iterable[str] | None = None) -> list[str]:
    """Return the names of requirements that are not installed; by default, check the package's requirements."""
    wanted = dependencies() if requirements is None else requirements
    return [name for each in wanted if not is_installed(name := name_of(each))]


def use_carried(folder: Path = CARRIED) -> None:
    """Make this process and its child processes import packages from `folder` first."""
    if not folder.is_dir() or str(folder) in sys.path:
        return
    sys.path.insert(0, str(folder))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *paths])


def download_command(
    folder: Path, python: str, packages: Sequence[str] = (), root: Path = ROOT, *, only_checked: bool = False
) -> list[str]:
    """Return the pip command that downloads the package's dependencies and `packages` for another machine.

    If `only_checked` is true, the command downloads only the dependencies that checks need.
    """
    wanted = [
        each
        for each in dependencies(root)
        if name_of(each) not in PRESENT and (name_of(each) in CHECKED or not only_checked)
    ]
    platforms = [option for name in _PLATFORMS for option in ("--platform", name)]
    return [
        *(sys.executable, "-m", "pip", "download", "--dest", str(folder), "--only-binary", ":all:"),
        *("--python-version", python, "--implementation", "cp", *platforms),
        *("--constraint", str(root / "constraints.txt")),
        *wanted,
        *packages,
    ]


def download(folder: Path, python: str, packages: Sequence[str] = (), *, only_checked: bool = False) -> None:
    """Download wheels to `folder`, without packages that the other machine is expected to have."""
    folder.mkdir(parents=True, exist_ok=True)
    command = download_command(folder, python, packages, only_checked=only_checked)
    run(command, "downloading the wheels failed")
    for wheel in folder.glob("*.whl"):
        if name_of(wheel.name) in PRESENT:
            wheel.unlink()


def install(wheels: Path, target: Path = CARRIED) -> list[str]:
    """Install wheels whose packages are missing or older, without a network; return the package names."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SetupError(
            f"--wheels: expected wheels (*.whl) in {wheels}, found none; "
            f"to download wheels: python -m benchmarks.gpu wheels {wheels}"
        )
    use_carried(target)
    wanted = [file for file in files if not is_installed(name_of(file.name)) or is_older(file)]
    if wanted:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
        ]
        command += ["--disable-pip-version-check", "--target", str(target), *map(str, wanted)]
        run(command, "installing the wheels failed")
    use_carried(target)
    importlib.invalidate_caches()
    return [name_of(file.name) for file in wanted]


def build_core(root: Path = ROOT) -> None:
    """Compile the C core in place with setuptools; if this fails, call the compiler directly.

    Raises:
        SetupError: No compiler is installed, or the compilation failed.
    """
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=root, capture_output=True, text=True, env=_without_paths())
    found = list((root / "farandole" / "native").glob("_core*.so"))
    if built.returncode == 0 and found:
        return
    sources = sorted(map(str, (root / "farandole" / "native").glob("*.c")))
    library = root / "farandole" / "native" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiler = os.environ.get("CC", "cc")
    run(
        [compiler, *_FLAGS, "-fPIC", "-shared", "-o", str(library), *sources],
        "compiling the C core failed",
    )


def _without_paths() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run(command: Sequence[str], failure: str) -> None:
    """Run a command; if it fails, raise `SetupError` with the end of its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise SetupError(f"{failure}: {command[0]}: {error.strerror}") from error
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-15:]
        raise SetupError(f"{failure} ({' '.join(command[:6])} ...):\n" + "\n".join(lines))
