"""Test that packages import only lower packages, and that `import farandole` loads few modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "farandole"

LEVELS = [
    {"_exceptions", "_extras", "_job_key", "_startup", "_torch_versions", "_troubleshooting"},
    {"native"},
    {"comm", "_autoload"},
    {"mesh", "layout", "plan"},
    {"memory"},
    {"parallel"},
    {"planner"},
    {"train", "edge", "learn", "launch"},
    {"serve", "horovod"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
"""A package may import packages of its own level and of lower levels; the lowest level comes first."""

LOW = {"models", "data"}
"""Packages that import no other package of farandole, except links to the documentation; `memory` and higher packages
may import them."""

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def level_of(package: str) -> int:
    for level, packages in enumerate(LEVELS):
        if package in packages:
            return level
    raise AssertionError(f"farandole/{package} has no level: add it to LEVELS in {__file__}")


def imported_packages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the package of every import of farandole in a file, also inside functions."""
    package = ["farandole", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "farandole" and len(parts) > 1 and is_package(parts[1]):
                yield node.lineno, parts[1]


def is_package(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_packages_import_lower_packages_only(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for line, other in imported_packages(path):
        where = f"{path}:{line}: farandole.{own} imports farandole.{other}"
        if own in LOW:
            assert other in (own, "_troubleshooting"), f"{where}, but {own} must not import other packages"
        elif other in LOW:
            assert level_of(own) >= level_of("memory"), f"{where}, a higher package"
        else:
            assert level_of(other) <= level_of(own), f"{where}, a higher package"


def test_imports_inside_functions_are_found(tmp_path, monkeypatch):
    file = PACKAGE / "comm" / "made_up.py"
    source = "def f():\n    from farandole.launch.runtime import init\n    from ..cli import main\n"
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    assert list(imported_packages(file)) == [(2, "launch"), (3, "cli")]


def loaded_by(*statements: str) -> list[set[str]]:
    """Run statements in a new interpreter; return the modules that are loaded after each one."""
    show = "print(*set(sys.modules) - before)"
    code = "; ".join(["import sys; before = set(sys.modules)", *(f"{each}; {show}" for each in statements)])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in run.stdout.splitlines()]


def test_importing_the_package_loads_few_modules():
    (loaded,) = loaded_by("import farandole; farandole.__version__")
    assert not loaded & {"torch", "numpy", "typer", "rich", "matplotlib", "pydantic"}


def test_importing_the_command_line_does_not_load_torch():
    (loaded,) = loaded_by("import farandole.cli.main")
    assert not loaded & {"torch", "numpy", "matplotlib", "pyarrow"}


def test_names_are_loaded_on_use():
    """In one interpreter, because each import of torch takes seconds."""
    groups, names, data, training = loaded_by(
        "import farandole.comm.backend.groups, farandole.comm.mpi.backend",
        "farandole.init; farandole.Communicator; farandole.Runtime",
        "farandole.parallelize",
        "farandole.LLM; import farandole.train.run",
    )
    assert "torch" in groups
    assert "torch._dynamo" not in groups  # the compiler
    assert "farandole.launch.runtime" in names
    assert not names & {"typer", "matplotlib", "tensorboard"}
    assert "farandole.parallel.engine" in data - names
    axes = {f"farandole.parallel.{axis}" for axis in ("context", "expert", "tensor")}
    models = {f"farandole.models.{model}" for model in ("bert", "llama", "t5")}
    assert not data & axes and not data & models
    assert "farandole.train.run" in training
    # the first checkpoint loads these modules
    assert not training & {"torch.distributed.checkpoint", "torch.distributed.tensor", "sympy", "matplotlib"}


def test_the_error_for_an_unknown_name_lists_known_names():
    import farandole

    with pytest.raises(AttributeError, match="no attribute 'initialize'; it has .*init"):
        _ = farandole.initialize
