"""Which of the backends can take part: what is installed, who starts the ranks, and what each of them can do."""

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
from farandole.bench.collectives_mpi import REDUCIBLE, reduces
from farandole.bench.collectives_operations import OPERATIONS, Operation
from farandole.bench.collectives_setup import CollectivesSetup
from farandole.bench.setup import BenchError, one_of
from farandole.comm import register
from farandole.comm.fallback import has_nccl
from farandole.data.wording import counted
from farandole.launch.cores import usable_cores

BACKENDS = {
    "farandole": "ours",
    "shared": "ours, with buffers that all ranks share",
    "gloo": "torch's Gloo",
    "mpi": "MPI itself, through mpi4py",
    "farandole-mpi": "MPI as our backend of torch.distributed",
    "nccl": "NCCL, on accelerators",
}
OVER_MPI = ("mpi", "farandole-mpi")


def choose(setup: CollectivesSetup, ranks: int, launcher: str) -> CollectivesSetup:
    """The setup with its backends: those asked for, or all that can measure anything of it.

    launcher: who starts the ranks, in the words of `Placement`.  `BenchError` for one that was asked for and
    cannot do everything.
    """
    for name in setup.backends:
        one_of("--backend", name, BACKENDS)
    reasons: dict[str, str] = {}
    for name in setup.backends or BACKENDS:
        reason = absence(name, ranks, launcher)
        unable = [inability(name, OPERATIONS[each], setup) for each in setup.operations]
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
            if not absence(each, ranks, launcher)
            and not any(inability(each, OPERATIONS[op], setup) for op in setup.operations)
        ]
        raise BenchError(f"--backend {name}: {reason}; there are {', '.join(working)}")
    return replace(setup, backends=tuple(dict.fromkeys(able)), left_out=reasons)


def absence(name: str, ranks: int, launcher: str) -> str | None:
    """Why a backend is not here, or None."""
    if name == "shared" and not native.available():
        return f"the core that shares memory is not here: {native.why_unavailable()}"
    if name == "nccl":
        if not has_nccl():
            return "there is no CUDA here"
        if ranks > torch.cuda.device_count():
            return f"NCCL wants an accelerator for every rank, and there are {torch.cuda.device_count()}"
    if name in OVER_MPI:
        register()
        if name not in dist.Backend.backend_list and name != "mpi":
            return "this installation does not have it"
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed (pip install mpi4py mpich)"
        if not launcher.startswith(("mpirun", "srun")):
            return f"the ranks are started by {launcher}, not by mpirun"
    return None


def inability(name: str, operation: Operation, setup: CollectivesSetup) -> str | None:
    """Why a backend that is here cannot do an operation as asked, or None."""
    if name == "shared" and (operation.messages or not operation.sized):
        return f"{operation.name} is the same with any memory"
    if name in ("gloo", "nccl") and setup.dtype == "int16" and operation.sized:
        return f"{name} has no int16"
    if name == "nccl" and setup.reduction in ("and", "or", "xor") and operation.reduces:
        return f"nccl has no {setup.reduction}"
    if name == "gloo" and operation.reduces and setup.reduction == "avg" and not setup.kind.is_floating_point:
        return "gloo does not average whole numbers"
    if name == "mpi" and operation.reduces:
        if not reduces(setup.reduction):
            return f"MPI has no {setup.reduction}"
        if setup.dtype not in REDUCIBLE:
            return f"mpi4py does not reduce {setup.dtype}"
    return None


def mpiexec_for(setup: CollectivesSetup, ranks: int) -> str | None:
    """The mpiexec by which ranks are to be started, so that MPI takes part; None to start them ourselves."""
    asked = [name for name in OVER_MPI if name in setup.backends]
    if importlib.util.find_spec("mpi4py") is None or (setup.backends and not asked):
        return None
    found = find_mpiexec()
    if found is None and asked:
        raise BenchError(f"--backend {asked[0]}: there is no mpiexec here (pip install mpich)")
    # MPI waits by spinning: others are left out of the cores, and measured so
    crowded = ranks > usable_cores()
    return found if asked or not crowded else None


def find_mpiexec() -> str | None:
    """The mpiexec beside this Python, or on the path."""
    return shutil.which(
        "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )


def without_mpiexec(setup: CollectivesSetup, ranks: int) -> str:
    """How ranks are started instead, in the words of a reason why MPI takes no part."""
    if find_mpiexec() is None:
        return "farandole launch as there is no mpiexec"
    return (
        f"farandole launch, as MPI spins and {counted(ranks, 'rank')} share {counted(usable_cores(), 'core')}"
    )
