"""Compare the public names and signatures with public_api.txt, so that changes are intended.

python -m tests.test_public_api      # writes public_api.txt
"""

from __future__ import annotations

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
    """Yield the modules that define `__all__`, except the modules that need TensorFlow."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if (
            "tensorflow" not in path.parts
            and "keras" not in path.parts
            and re.search(r"^__all__ = ", path.read_text(), re.MULTILINE)
        ):
            yield ".".join(["farandole", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
                ".__init__"
            )


def signature(value: Any) -> str:
    try:
        found = str(inspect.signature(value)).replace("'", "")
    except (TypeError, ValueError):
        return ""
    return re.sub(r"<(?:class )?(?:\w+\.)*(\w+)(?: object at \w+)?>", r"\1", found)


def public_names() -> Iterator[str]:
    """Yield a line for each public name, and for each public method of a class."""
    for name in modules():
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
