"""Compare the public names and signatures with public_api.txt, so that changes are intended.

python -m tests.test_public_api      # writes public_api.txt
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_name("public_api.txt")
PACKAGE = Path(__file__).parents[1] / "farandole"


def modules() -> Iterator[str]:
    """Yield the modules that define `__all__`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search(r"^__all__ = ", path.read_text(), re.MULTILINE):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            yield ".".join(["farandole", *parts]).removesuffix(".__init__")


def needs_tensorflow(module: str) -> bool:
    return not {"tensorflow", "keras"}.isdisjoint(module.split("."))


def signature(value: Any) -> str:
    try:
        found = str(inspect.signature(value)).replace("'", "")
    except (TypeError, ValueError):
        return ""
    return re.sub(r"<(?:class )?(?:\w+\.)*(\w+)(?: object at \w+)?>", r"\1", found)


def public_names() -> Iterator[str]:
    """Yield a line for each public name, and for each public method of a class."""
    for name in modules():
        if needs_tensorflow(name):
            yield from parsed_names(name)
            continue
        module = importlib.import_module(name)
        for public in sorted(module.__all__):
            value = getattr(module, public)
            if not inspect.isclass(value):
                yield f"{name}.{public}{signature(value) if callable(value) else ''}"
                continue
            yield f"class {name}.{public}{signature(value)}"
            for method, member in sorted(vars(value).items()):
                if not method.startswith("_") and not method.isupper():
                    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                    yield f"    {method}{signature(function) if callable(function) else ''}"


# ---- modules that cannot be imported without TensorFlow ----


def parse(module: str) -> ast.Module:
    folder = PACKAGE.parent.joinpath(*module.split("."))
    return ast.parse((folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")).read_text())


def imported(tree: ast.Module, name: str) -> tuple[str, str]:
    """Return the module that `name` is or comes from, and its name in that module, or ""."""
    everything = ("", "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return (module, alias.name) if module else (alias.name, "")
                if alias.name == "*":
                    everything = (module, name)
    return everything


def exported(module: str) -> list[str]:
    """Return `__all__`, in which another module's `__all__` may be unpacked."""
    tree = parse(module)
    assigned = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets)
    )
    assert isinstance(assigned, ast.List)
    names: list[str] = []
    for element in assigned.elts:
        if isinstance(element, ast.Starred):
            module, name = imported(tree, ast.unparse(element.value).removesuffix(".__all__"))
            names += exported(f"{module}.{name}".removesuffix("."))
        else:
            names.append(ast.literal_eval(element))
    return names


def definition(module: str, name: str) -> ast.stmt | None:
    """Return the function or class that `module` defines or imports as `name`, or None for other values."""
    if not module.startswith("farandole"):
        return None
    tree = parse(module)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    source, original = imported(tree, name)
    return definition(source, original) if original else None


def parsed_signature(function: ast.FunctionDef) -> str:
    arguments = ast.unparse(function.args)
    result = "" if function.returns is None else f" -> {ast.unparse(function.returns)}"
    return f"({arguments}){result}"


def parsed_names(module: str) -> Iterator[str]:
    """Yield the lines of a module without importing it."""
    for name in sorted(set(exported(module))):
        node = definition(module, name)
        if isinstance(node, ast.FunctionDef):
            yield f"{module}.{name}{parsed_signature(node)}"
        elif isinstance(node, ast.ClassDef):
            methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            start = methods.get("__init__")
            yield f"class {module}.{name}{parsed_signature(start) if start else ''}"
            for method, function in sorted(methods.items()):
                if not method.startswith("_"):
                    yield f"    {method}{parsed_signature(function)}"
        else:
            yield f"{module}.{name}"


def test_public_names_match_the_list() -> None:
    found = list(public_names())
    changes = [
        line
        for line in difflib.unified_diff(
            LIST.read_text().splitlines(), found, "listed", "found", n=0, lineterm=""
        )
        if not line.startswith("@@")
    ]
    if changes:
        update = "if that is intended, run python -m tests.test_public_api and add an entry to CHANGELOG.md:"
        pytest.fail("\n".join(["the public API has changed;", update, *changes]), pytrace=False)


if __name__ == "__main__":
    LIST.write_text("\n".join(public_names()) + "\n")
