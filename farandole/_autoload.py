"""What torch finds through the entry points `torch.backends` and `torch.distributed.backends`.

It makes `torch.distributed.init_process_group("farandole")`, and "farandole-mpi", work in a program that never
imports this package.  It runs at `import torch`, so it only leaves names behind; the rest loads when a group is
made.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

OVER_MPI = "farandole-mpi"


def register() -> None:
    """Make our backends known to `torch.distributed` (again is harmless)."""
    import torch.distributed as dist

    if dist.is_available() and "FARANDOLE" not in dist.Backend._plugins:
        dist.Backend.register_backend("farandole", _create, extended_api=True, devices=["cpu", "cuda"])
        dist.Backend.register_backend(OVER_MPI, _create_over_mpi, extended_api=True, devices=["cpu", "cuda"])
        dist.register_rendezvous_handler("mpi", _meet_through_mpi)
        init = _met_through_mpi(dist.init_process_group)
        dist.init_process_group = dist.distributed_c10d.init_process_group = init


def _create(options: Any, backend_options: Any) -> Any:
    from farandole.comm.backend import create

    return create(options, backend_options)


def _create_over_mpi(options: Any, backend_options: Any) -> Any:
    from farandole.comm.mpi.backend import create

    return create(options, backend_options)


def _meet_through_mpi(url: str, **options: Any) -> Iterator[Any]:
    from farandole.comm.mpi.backend import rendezvous

    return rendezvous(url, **options)


def _met_through_mpi(init: Callable[..., None]) -> Callable[..., None]:
    """`init_process_group`, whose default for the backend over MPI is the init_method "mpi://".

    For all backends but its own "mpi", torch looks for ranks in the variables of torchrun, before it asks the backend.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        placed = any(
            given.get(name, -1) not in (None, -1) for name in ("init_method", "store", "rank", "world_size")
        )
        if OVER_MPI in str(given.get("backend")).lower() and not placed and "RANK" not in os.environ:
            given["init_method"] = "mpi://"
        try:
            init(*call.args, **call.kwargs)
        except (RuntimeError, ValueError) as error:
            if advice := _advice(str(given.get("backend")).lower(), placed):
                error.add_note(advice)
            raise

    return init_process_group


def _advice(backend: str, placed: bool) -> str | None:
    """What torch, whose words for it are no help, does not know of two mistakes with MPI."""
    import torch.distributed as dist

    if backend == "mpi" and not dist.is_mpi_available():
        return 'farandole has a backend "mpi" for the stock wheel: call farandole.comm.mpi.enable() before'
    started = {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"} & os.environ.keys()
    if (
        "farandole" in backend
        and OVER_MPI not in backend
        and not placed
        and started
        and "RANK" not in os.environ
    ):
        return (
            f"mpirun and srun do not set RANK ({min(started)} is set): farandole.init() finds its place under them, "
            f'and so does init_process_group("{OVER_MPI}")'
        )
    return None
