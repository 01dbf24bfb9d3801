"""Initializes mpi4py's MPI library, and checks that the launcher belongs to this library.

The thread level is "serialized": threads may call MPI one at a time (see `engine.py`).  With "multiple", mpi4py's
default, MPICH does not use its shared-memory collectives.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole.comm.errors import CommunicationError
from farandole.comm.notices import warn_once

_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "Hydra, the mpiexec of MPICH and derived libraries,",
    "WORLD_SIZE": "torchrun (or another program that sets WORLD_SIZE)",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""The environment variables in which launchers pass the number of ranks, with the innermost launcher first."""

NO_FORK = (
    "MPI cannot be used in this process, because it was forked from a process that uses MPI; start this process "
    "with the multiprocessing method 'spawn' (for a DataLoader, multiprocessing_context='spawn')"
)


class MpiUnavailable(CommunicationError):
    """Raised if MPI cannot be used; the message states the remedy."""

    _section = "mpiunavailable"


@functools.cache
def load() -> Any:
    """Return the initialized module `mpi4py.MPI`; raise `MpiUnavailable` if MPI cannot be used."""
    try:
        import mpi4py
    except ImportError as error:
        raise MpiUnavailable(
            "the backend farandole-mpi needs mpi4py 4 or later and an MPI library; run pip install 'farandole[mpi]', "
            "then load the cluster's MPI module or run pip install mpich"
        ) from error
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # initialized below, finalized at program exit
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MpiUnavailable(
            f"mpi4py is installed but cannot find an MPI library: {error}; load the cluster's MPI module, set "
            "MPI4PY_LIBMPI to "
            f"the path of libmpi.so, or run pip install mpich"
        ) from error
    if MPI.Is_finalized():
        raise MpiUnavailable(
            "MPI cannot be initialized again, because this program has already finalized it; remove the call to "
            "MPI.Finalize()"
        )
    if not MPI.Is_initialized():
        _warn_of_launcher(os.environ, describe_library(MPI))
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
            comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py converts error codes to exceptions
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise MpiUnavailable(
            "expected MPI with the thread level 'serialized', got 'single' or 'funneled'; before the first "
            "`from mpi4py import MPI` write `import mpi4py; mpi4py.rc.thread_level = 'serialized'`"
        )
    check_world(os.environ, MPI.COMM_WORLD.Get_size(), describe_library(MPI))
    _process.append(os.getpid())
    return MPI


_process: list[int] = []


def loaded() -> Any:
    """Return `mpi4py.MPI`; raise `MpiUnavailable` if MPI cannot be used, for example in a forked child."""
    mpi = load()
    if _process[0] != os.getpid():
        raise MpiUnavailable(NO_FORK)
    return mpi


def describe_library(mpi: Any) -> str:
    """Return the library's name and version, such as `MPICH 5.0.2`."""
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def check_world(environ: Mapping[str, str], size: int, library: str) -> None:
    """Raise `MpiUnavailable` if a launcher started several ranks but MPI reports a single rank.

    This happens if the mpirun of one MPI library starts processes that load another MPI library.  Each process would
    then run the whole job alone.
    """
    variable = next((name for name in _SIZES if environ.get(name, "").isdecimal()), None)
    if size != 1 or variable is None or int(environ[variable]) <= 1:
        return
    raise MpiUnavailable(
        f"{_SIZES[variable]} started {environ[variable]} ranks ({variable}={environ[variable]}), but mpi4py has "
        f"loaded {library}, which reports a single rank; {_remedy(variable)}"
    )


def _warn_of_launcher(environ: Mapping[str, str], library: str) -> None:
    """Log a warning if Open MPI's mpirun started this process but mpi4py loads another MPI library."""
    # called before MPI_Init, because most other MPI libraries exit in MPI_Init in this case
    variable = "OMPI_COMM_WORLD_SIZE"
    if environ.get(variable, "1") != "1" and not library.startswith("Open MPI"):
        warn_once(
            f"{_SIZES[variable]} started this process, but mpi4py loads {library}; if MPI initialization fails, "
            f"{_remedy(variable)}"
        )


def _remedy(variable: str) -> str:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    start = "start the ranks with that library's own mpiexec" + (
        f" (perhaps {mpiexec})" if mpiexec.exists() else ""
    )
    if variable == "WORLD_SIZE":
        return f"{start}, or use the backend farandole with this launcher"
    if variable == "SLURM_STEP_NUM_TASKS":
        return f"use srun --mpi=pmix (or pmi2; see `srun --mpi=list`), or {start}"
    return (
        f"{start}, or let mpi4py load the launcher's library: set MPI4PY_LIBMPI=/path/to/libmpi.so, or "
        "MPI4PY_MPIABI=openmpi (or mpich) if both are installed; the backend farandole works without MPI (`farandole "
        "launch`)"
    )
