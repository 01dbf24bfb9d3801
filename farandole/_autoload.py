"""Register the backends "farandole" and "farandole-mpi" when torch is imported.

torch calls the entry points `autoload` (group `torch.backends`) and `register` (group `torch.distributed.backends`).
A program can therefore use the backends without importing this package.  `import torch` calls `autoload`, so this
module only registers names; other modules are loaded when a process group is created.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

OVER_MPI = "farandole-mpi"

REPLACE_GLOO = "FARANDOLE_REPLACE_GLOO"
"""If this environment variable is 1, `init_process_group` creates a farandole group when a program requests Gloo."""

_log = logging.getLogger("farandole")
_registered = False
_devices = ["cpu", "cuda"]
"""The devices that the backends support.

torch prefers an accelerator in this list to the CPU, so `init_process_group` removes "cuda" if there is no CUDA device.
"""


def autoload() -> None:
    """Register the backends when torch is imported.

    If the registration fails, log the error as one line instead of raising it.  A later call to `init_process_group`
    with one of these backends raises the error.
    """
    try:
        register()
    except Exception as error:
        _log.warning(str(error))
        with contextlib.suppress(Exception):  # torch may lack this function too
            _raise_when_used(error)


def register() -> None:
    """Register the backends with `torch.distributed`; a repeated call has no effect.

    Raises:
        RuntimeError: if this version of torch lacks a function that a backend needs.
    """
    global _registered
    if _registered:
        return
    try:
        _register()
    except Exception as error:
        raise RuntimeError(_failure(error)) from error
    _registered = True


def _register() -> None:
    import torch.distributed as dist

    if dist.is_available():
        register_backend = dist.Backend.register_backend
        register_backend("farandole", _create, extended_api=True, devices=_devices)
        register_backend(OVER_MPI, _create_over_mpi, extended_api=True, devices=_devices)
        dist.register_rendezvous_handler("mpi", _rendezvous_over_mpi)
        init, barrier = (
            _init_process_group(dist.init_process_group),
            _monitored_barrier(dist.monitored_barrier),
        )
        dist.init_process_group = dist.distributed_c10d.init_process_group = init
        dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = barrier
        batch = _batch_isend_irecv(dist.batch_isend_irecv)
        dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batch


def _failure(error: Exception) -> str:
    """Return a one-line error message for a failed registration."""
    import torch

    from farandole import __version__
    from farandole._torch_versions import tested

    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"farandole: cannot register its backends with torch {torch.__version__}: {cause}; "
        f"farandole {__version__} is {tested()}; install one of these versions"
    )


def _raise_when_used(failure: Exception) -> None:
    """Make `init_process_group` raise `failure` if a program requests a backend of this package."""
    import torch.distributed as dist

    init = dist.init_process_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        backend = args[0] if args else kwargs.get("backend")
        if "farandole" in str(backend).lower() and not _registered:
            raise failure
        init(*args, **kwargs)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group


def _create(options: Any, backend_options: Any) -> Any:
    from farandole.comm.backend.groups import create

    return create(options, backend_options)


def _create_over_mpi(options: Any, backend_options: Any) -> Any:
    from farandole.comm.mpi.backend import create

    return create(options, backend_options)


def _rendezvous_over_mpi(url: str, **options: Any) -> Iterator[Any]:
    from farandole.comm.mpi.backend import rendezvous

    return rendezvous(url, **options)


def _monitored_barrier(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap torch's `monitored_barrier`, which accepts only Gloo, to support the backends of this package."""

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        import torch.distributed as dist

        own: Any = group or dist.group.WORLD
        if hasattr(own, "communicator"):  # a group of this package that contains this rank
            own.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    return monitored_barrier


def _batch_isend_irecv(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's `batch_isend_irecv` to post CUDA messages as one batch."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        # torch posts the messages one by one if the process group is implemented in Python
        try:
            post = p2p_op_list[0].group.post_batch if p2p_op_list[0].tensor.is_cuda else None
        except (AttributeError, IndexError, KeyError, TypeError):
            post = None  # another group or invalid arguments: torch raises the error
        if post is None:
            return original(p2p_op_list)
        import torch.distributed as dist

        dist.distributed_c10d._check_p2p_op_list(p2p_op_list)
        return post([(op.op is dist.isend, op.tensor, op.group_peer, op.tag) for op in p2p_op_list])

    return batch_isend_irecv


def _init_process_group(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap torch's `init_process_group` to add defaults and advice for the backends of this package."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        placed = any(
            given.get(name, -1) not in (None, -1) for name in ("init_method", "store", "rank", "world_size")
        )
        if OVER_MPI in str(given.get("backend")).lower() and not placed and "RANK" not in os.environ:
            # by default, torch reads the rank from RANK, which torchrun sets but mpirun and srun do not
            given["init_method"] = "mpi://"
        import torch

        # unlike is_available, this leaves CUDA uninitialized where it can, so that the program may still fork
        _devices[:] = ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]
        if os.environ.get(REPLACE_GLOO) == "1":
            given["backend"] = _replace_gloo(given.get("backend"))
        try:
            init(*call.args, **call.kwargs)
        except (RuntimeError, ValueError) as error:
            if advice := _advice(str(given.get("backend")).lower(), placed):
                error.add_note(advice)
            raise

    return init_process_group


def _replace_gloo(backend: str | None) -> str:
    """Return `backend`, or torch's default if it is empty, with "gloo" replaced by "farandole"."""
    backend = backend or ("cpu:gloo,cuda:nccl" if "cuda" in _devices else "gloo")
    return re.sub(r"\bgloo\b", "farandole", backend, flags=re.IGNORECASE)


def _advice(backend: str, placed: bool) -> str | None:
    """Return advice if the user made a common mistake with MPI, otherwise None."""
    import torch.distributed as dist

    if backend == "mpi" and not dist.is_mpi_available():
        return 'this torch was built without MPI: call farandole.comm.mpi.enable() before init_process_group("mpi")'
    started = {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"} & os.environ.keys()
    if (
        "farandole" in backend
        and OVER_MPI not in backend
        and not placed
        and started
        and "RANK" not in os.environ
    ):
        return (
            f"mpirun and srun do not set RANK ({min(started)} is set): use farandole.init() or "
            f'init_process_group("{OVER_MPI}"), which take the rank from MPI or Slurm'
        )
    return None
