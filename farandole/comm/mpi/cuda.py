"""CUDA tensors over MPI.  This code has not been tested on a GPU or with a CUDA-aware MPI.

A CUDA-aware MPI accepts device memory addresses.  Open MPI, MPICH and libraries derived from MPICH provide
`MPIX_Query_cuda_support`, which returns whether the library is CUDA-aware.  With other libraries, tensors are copied
to pinned host memory.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

_MEMORY_TYPE, _ON_DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE


@functools.cache
def is_aware() -> bool:
    """Return whether the loaded MPI library accepts CUDA memory addresses."""
    if not torch.cuda.is_available():
        return False
    query = getattr(ctypes.CDLL(None), "MPIX_Query_cuda_support", None) or _query_in_loaded_library()
    return bool(query and query())


def _query_in_loaded_library() -> Any:
    """Find `MPIX_Query_cuda_support` in the library file; mpi4py does not export MPI's symbols."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libmpi" in line and ".so" in line}
    for path in sorted(paths):
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None:
            return query
    return None


def tensor_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return a view of `count` elements at a host address or, with a CUDA-aware MPI, at a device address."""
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    if is_aware() and _is_on_device(address):
        view = type("View", (), {"__cuda_array_interface__": _describe(address, count * dtype.itemsize)})()
        return torch.as_tensor(view, device="cuda").view(dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


def _describe(address: int, nbytes: int) -> dict[str, Any]:
    return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _is_on_device(address: int) -> bool:
    kind = ctypes.c_uint(0)
    query = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    found = query(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address)) == 0
    return found and kind.value == _ON_DEVICE
