"""The optional dependencies, grouped in extras: `pip install 'farandole[train]'`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from farandole._troubleshooting import see

EXTRAS = {
    "train": ("PIL", "platformdirs", "pyarrow", "pydantic", "safetensors", "tensorboard", "tokenizers"),
    "serve": ("fastapi", "llguidance", "starlette", "uvicorn"),
    "plot": ("matplotlib",),
    "mpi": ("mpi4py",),
    "qlora": ("torchao",),  # also the extra "fp8"
    "labs": ("sklearn",),
    "tensorflow": ("tensorflow", "keras"),
}
"""The modules that each extra installs."""

NEEDED_BY_COMMAND = {
    "train": ("pydantic", "safetensors", "tensorboard", "tokenizers"),
    "plan": ("pydantic",),
    "generate": ("pydantic", "safetensors", "tokenizers"),
    "serve": ("fastapi", "uvicorn", "pydantic", "safetensors", "tokenizers"),
}
"""The modules of extras that each farandole command imports in every run."""


def explain_missing(error: ModuleNotFoundError) -> str | None:
    """Return a message with the command that installs the missing module, or None if no extra contains the module."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"{module} is not installed: pip install 'farandole[{extra}]'{see('is-not-installed')}"
    return None


def require(modules: Iterable[str]) -> None:
    """Raise ModuleNotFoundError with the install command if one of `modules` is not installed.

    The modules are not imported.
    """
    with optional_import():
        for module in modules:
            if find_spec(module) is None:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)


@contextmanager
def optional_import() -> Iterator[None]:
    """Return a context manager that adds the install command to `ModuleNotFoundError` for modules in `EXTRAS`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (message := explain_missing(error)) is None:
            raise
        raise ModuleNotFoundError(message, name=error.name) from error
