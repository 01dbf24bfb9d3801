"""The optional dependencies, grouped in extras: `pip install 'farandole[train]'`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


def explain_missing(error: ModuleNotFoundError) -> str | None:
    """Return a message with the command that installs the missing module, or None if no extra contains the module."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"{module} is not installed: pip install 'farandole[{extra}]'{see('is-not-installed')}"
    return None


@contextmanager
def optional_import() -> Iterator[None]:
    """Return a context in which a failed import of a module in `EXTRAS` raises an error with the install command."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (message := explain_missing(error)) is None:
            raise
        raise ModuleNotFoundError(message, name=error.name) from error
