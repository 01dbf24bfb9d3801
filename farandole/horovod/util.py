"""Provide the functions in `horovod.common.util`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from farandole.horovod.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables within a `with` block.  A variable with the value None is not changed."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Split a list into consecutive parts whose lengths differ by at most one."""
    share, more = divmod(len(items), parts)
    starts = [part * share + min(part, more) for part in range(parts + 1)]
    return [items[start:end] for start, end in zip(starts, starts[1:], strict=False)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether `num_rank` is a power of two, as Adasum requires."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(value: Any) -> bool:
    """Return whether `iter(value)` works."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Return whether `version` (for example "2.13.0+cpu") is at least `target` (for example "2.6.0")."""
    return torch.torch_version.TorchVersion(version) >= target


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework, "torch" or "tensorflow", is installed."""
    return ext_base_name in ("torch", "tensorflow") and importlib.util.find_spec(ext_base_name) is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Do nothing, because no framework needs a compiled extension."""


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether PyTorch can use a GPU."""
    return torch.cuda.is_available()


__all__ = [
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]
