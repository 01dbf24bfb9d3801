"""Horovod's functions for all frameworks, and the functions in `horovod.common.util`.

The functions `*_built` and `*_enabled` describe the torch.distributed backends.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from farandole.horovod.execution import split_evenly
from farandole.horovod.state import horovod

init = horovod.init
shutdown = horovod.shutdown
add_process_set = horovod.add_process_set
remove_process_set = horovod.remove_process_set


def is_initialized() -> bool:
    """Return whether Horovod is initialized: True between `init` and `shutdown`."""
    return horovod.runtime is not None


def rank() -> int:
    """Return this process's rank, 0 to size() - 1."""
    return horovod.rank


def size() -> int:
    """Return the number of processes."""
    return horovod.size


def local_rank() -> int:
    """Return this process's rank on its host."""
    return horovod.local[0]


def local_size() -> int:
    """Return the number of processes on this host."""
    return horovod.local[1]


def cross_rank() -> int:
    """Return this host's index among the hosts that have a process with this process's local rank."""
    return horovod.local[2]


def cross_size() -> int:
    """Return the number of hosts that have a process with this process's local rank."""
    return horovod.local[3]


def is_homogeneous() -> bool:
    """Return whether every host has the same number of processes."""
    return horovod.homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start writing a timeline on rank 0.

    Args:
        file_path: The file to write.
        mark_cycles: Whether to mark each negotiation cycle that executes operations.

    Raises:
        ValueError: if a timeline is already being written.
        OSError: if the file cannot be written.
    """
    horovod.joined()
    horovod.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Stop the timeline and close its file."""
    horovod.joined()
    horovod.timeline.stop()


def mpi_threads_supported() -> bool:
    """Raise ValueError, because ranks do not communicate through MPI."""
    horovod.joined()
    raise ValueError("Horovod MPI is not enabled: ranks communicate through farandole's process groups")


def mpi_built() -> bool:
    """Return False, because ranks never communicate through MPI, even if mpirun started them."""
    return False


def mpi_enabled() -> bool:
    """Return False; see `mpi_built`."""
    return False


def gloo_built() -> bool:
    """Return whether PyTorch was built with Gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Return whether this job communicates CPU tensors through Gloo.

    The result is False before `init` and in jobs that communicate through shared memory.
    """
    if horovod.runtime is None:
        return False
    group = horovod.runtime.comm.group
    return dist.get_backend(group) == "gloo" or getattr(group, "_host", group) is None


def nccl_built() -> int:
    """Return PyTorch's NCCL version as an integer (21903 for 2.19.3), or 0 without NCCL."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def cuda_built() -> bool:
    """Return whether PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether PyTorch was built with ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False, because IBM DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False, because Intel oneCCL is not used."""
    return False


# ---- horovod.common.util ----


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
    ends = itertools.accumulate(split_evenly(len(items), parts), initial=0)
    return [items[start:end] for start, end in itertools.pairwise(ends)]


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
    """Return whether the framework `ext_base_name`, "torch" or "tensorflow", is installed."""
    return ext_base_name in ("torch", "tensorflow") and importlib.util.find_spec(ext_base_name) is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Do nothing, because no framework needs a compiled extension."""


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether PyTorch can use a GPU."""
    return torch.cuda.is_available()


__all__ = [
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
"""The functions in every framework's namespace."""
