"""Choose the backends to measure, based on the installed packages, the launcher and the supported operations."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from farandole import native
from farandole.bench.collectives.mpi import REDUCIBLE, reduces
from farandole.bench.collectives.operations import OPERATIONS, Operation
from farandole.bench.collectives.setup import CollectivesSetup
from farandole.bench.options import BenchError, check_choice
from farandole.comm import register
from farandole.comm.fallback import has_nccl
from farandole.data.wording import counted
from farandole.launch.cores import usable_cores

BACKENDS = {
    "farandole": "farandole's own backend",
    "shared": "farandole with buffers in shared memory",
    "gloo": "torch's Gloo",
    "mpi": "MPI through mpi4py",
    "farandole-mpi": "MPI as a torch.distributed backend",
    "nccl": "NCCL, on accelerators",
}
OVER_MPI = ("mpi", "farandole-mpi")


def choose(setup: CollectivesSetup, ranks: int, launcher: str) -> CollectivesSetup:
    """Return a copy of `setup` with the backends to measure.

    If `setup.backends` is empty, the copy contains all available backends that support at least one requested
    operation, and its `left_out` maps each omitted backend to the reason.

    Args:
        launcher: the launcher that starts the ranks, as in `Placement.launcher`.

    Raises:
        BenchError: if a requested backend is unknown, is unavailable, or does not support all requested operations.
    """
    for name in setup.backends:
        check_choice("--backend", name, BACKENDS)
    reasons: dict[str, str] = {}
    for name in setup.backends or BACKENDS:
        reason = why_unavailable(name, ranks, launcher)
        unable = [why_unsupported(name, OPERATIONS[each], setup) for each in setup.operations]
        if reason is None and (all(unable) or (setup.backends and any(unable))):
            reason = next(each for each in unable if each)
        if reason is not None:
            reasons[name] = reason
    able = [name for name in setup.backends or BACKENDS if name not in reasons]
    if setup.backends and reasons:
        name, reason = next(iter(reasons.items()))
        working = [
            each
            for each in BACKENDS
            if not why_unavailable(each, ranks, launcher)
            and not any(why_unsupported(each, OPERATIONS[op], setup) for op in setup.operations)
        ]
        raise BenchError(f"--backend {name}: {reason}; available: {', '.join(working)}")
    return replace(setup, backends=tuple(dict.fromkeys(able)), left_out=reasons)


def why_unavailable(name: str, ranks: int, launcher: str) -> str | None:
    """Return the reason why the backend `name` is unavailable in this job, or None if it is available."""
    if name == "shared" and not native.available():
        return f"the C core is unavailable: {native.why_unavailable()}"
    if name == "nccl":
        if not has_nccl():
            return "this machine has no CUDA device"
        if ranks > torch.cuda.device_count():
            return f"NCCL needs one accelerator per rank, but this machine has {torch.cuda.device_count()}"
    if name in OVER_MPI:
        register()
        if name not in dist.Backend.backend_list and name != "mpi":
            return "this installation does not include the backend"
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed (pip install mpi4py mpich)"
        if not launcher.startswith(("mpirun", "srun")):
            return f"mpirun must start the ranks, but they are started by {launcher}"
    return None


def why_unsupported(name: str, operation: Operation, setup: CollectivesSetup) -> str | None:
    """Return why the backend `name` does not support `operation` with the options in `setup`, or None if it does."""
    if name == "shared" and (operation.messages or not operation.sized):
        return f"shared memory makes no difference for {operation.name}"
    if name in ("gloo", "nccl") and setup.dtype == "int16" and operation.sized:
        return f"{name} does not support int16"
    if name == "nccl" and setup.reduction in ("and", "or", "xor") and operation.reduces:
        return f"nccl does not support --reduction {setup.reduction}"
    if name == "gloo" and operation.reduces and setup.reduction == "avg" and not setup.kind.is_floating_point:
        return "gloo does not average integers"
    if name == "mpi" and operation.reduces:
        if not reduces(setup.reduction):
            return f"MPI does not support --reduction {setup.reduction}"
        if setup.dtype not in REDUCIBLE:
            return f"mpi4py does not support reductions of {setup.dtype}"
    return None


def mpiexec_for(setup: CollectivesSetup, ranks: int) -> str | None:
    """Return the path of the mpiexec that must start the ranks, or None if `farandole launch` starts them.

    mpiexec starts the ranks if `setup.backends` includes an MPI backend.  If `setup.backends` is empty, mpiexec starts
    the ranks if mpiexec and mpi4py are installed and each rank has its own core.

    Raises:
        BenchError: if an MPI backend is requested but mpiexec is not installed.
    """
    asked = [name for name in OVER_MPI if name in setup.backends]
    if importlib.util.find_spec("mpi4py") is None or (setup.backends and not asked):
        return None
    found = find_mpiexec()
    if found is None and asked:
        raise BenchError(f"--backend {asked[0]} requires mpiexec, which is not installed (pip install mpich)")
    # MPI ranks spin while they wait, which would take the cores from the other backends
    crowded = ranks > usable_cores()
    return found if asked or not crowded else None


def find_mpiexec() -> str | None:
    """Return the path of mpiexec, or None if it is not found.

    The directory of the Python executable is searched before PATH.
    """
    return shutil.which(
        "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )


def without_mpiexec(setup: CollectivesSetup, ranks: int) -> str:
    """Return "farandole launch, because ...", with the reason why mpiexec does not start the job."""
    if find_mpiexec() is None:
        return "farandole launch, because there is no mpiexec"
    sharing = f"{counted(ranks, 'rank')} share {counted(usable_cores(), 'core')}"
    return f"farandole launch, because MPI ranks spin and {sharing}"
