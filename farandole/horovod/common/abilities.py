"""What carries the data: Horovod's questions about MPI, Gloo, NCCL and their like, answered for torch's backends."""

from __future__ import annotations

import torch
import torch.distributed as dist

from farandole.horovod.common.basics import horovod


def mpi_threads_supported() -> bool:
    """Whether MPI may be used beside it from any thread.  ValueError: MPI carries nothing here."""
    horovod.joined()
    raise ValueError("Horovod MPI is not enabled: ranks communicate through farandole's process groups")


def mpi_built() -> bool:
    """False: mpirun may start the ranks, but MPI does not carry their data."""
    return False


def mpi_enabled() -> bool:
    """False: see `mpi_built`."""
    return False


def gloo_built() -> bool:
    """Whether torch has Gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether Gloo carries CPU tensors in this job; false where ranks share memory, and before `init`."""
    if horovod.runtime is None:
        return False
    group = horovod.runtime.comm.group
    return dist.get_backend(group) == "gloo" or getattr(group, "_host", group) is None


def nccl_built() -> int:
    """The version number of torch's NCCL; 0 where there is none."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False
