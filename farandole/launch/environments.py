"""Identify the launcher that started this process, and read the rank from the launcher's environment variables.

For each launcher, one function maps `environ` to a `Placement`, or to None if the launcher's variables are not set.
`LAUNCHERS` lists these functions in order of precedence.  If launchers are nested, the innermost launcher takes
precedence: torchrun started by srun counts as torchrun.  mpirun in a Slurm allocation counts as mpirun, because Slurm's
variables then describe mpirun's helper processes, not the ranks.  srun may also set PMI variables, so srun precedes PMI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from farandole.launch.placement import (
    ALONE,
    Address,
    LaunchError,
    NoRendezvous,
    Placement,
    Rendezvous,
    SameHost,
    TorchVariables,
    master_address,
    read_placement,
)

RUN_ID_PREFIX = "farandole-"
"""The prefix of `farandole launch`'s run ids.  The elastic agent passes the run id to the ranks."""

FIRST_PORT, PORTS = 10_000, 20_000
"""Slurm jobs use a port from FIRST_PORT to FIRST_PORT + PORTS - 1, below Linux's ephemeral ports (32768 and up)."""


def find_placement(environ: Mapping[str, str]) -> Placement:
    """Return the placement that `environ` describes, or `ALONE` (one rank without a launcher).

    For example:

        find_placement({"RANK": "1", "WORLD_SIZE": "2", ...}).rank == 1
        find_placement({}).launcher == "alone"
    """
    return next((found for read in LAUNCHERS if (found := read(environ)) is not None), ALONE)


# ---- torchrun ----


def _torchrun(environ: Mapping[str, str]) -> Placement | None:
    """Read the variables that torch's elastic agent (torchrun, `farandole launch`) or the user has set."""
    # https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        launcher = "environment variables"
    else:
        launcher = "farandole launch" if run_id.startswith(RUN_ID_PREFIX) else "torchrun"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = read_placement(environ, launcher, TorchVariables(), *names)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing and found.size > 1:
        raise LaunchError(
            f"rank {found.rank} of {found.size} requires MASTER_ADDR and MASTER_PORT, the rendezvous "
            f"address; not set: {' and '.join(missing)}"
        )
    return found


# ---- MPI ----


def _hydra(environ: Mapping[str, str]) -> Placement | None:
    """Read the variables of Hydra, the mpiexec of MPICH, MVAPICH and Intel MPI."""
    if "MPI_LOCALRANKID" not in environ or "PMI_RANK" not in environ:
        return None
    # No variable identifies the job, but on each host all ranks descend from one `hydra_pmi_proxy`.
    one_host = environ.get("MPI_LOCALNRANKS") == environ.get("PMI_SIZE")
    advice = "on the first host, run mpiexec -genv MASTER_ADDR $(hostname) -genv MASTER_PORT 29500"
    rendezvous = master_address(environ, "mpirun (Hydra)") or (
        SameHost(_job_of_ancestor("hydra_pmi_proxy")) if one_host else NoRendezvous(advice)
    )
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return read_placement(environ, "mpirun (Hydra)", rendezvous, *names)


def _open_mpi(environ: Mapping[str, str]) -> Placement | None:
    """Read the variables of Open MPI's mpirun."""
    if "OMPI_COMM_WORLD_RANK" not in environ and "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    one_host = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environ.get("OMPI_COMM_WORLD_SIZE")
    # The PMIx namespace contains the process id of mpirun.  mpirun uses ORTE before version 5, and then PRRTE.
    job = environ.get("PMIX_NAMESPACE") or _job_of_ancestor("mpirun", "orterun", "orted", "prterun", "prted")
    advice = "on the first host, run mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500"
    rendezvous = master_address(environ, "mpirun (Open MPI)") or (
        SameHost(job) if one_host else NoRendezvous(advice)
    )
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return read_placement(environ, "mpirun (Open MPI)", rendezvous, *names)


def _pmi(environ: Mapping[str, str]) -> Placement | None:
    """Read the variables of PMI, which contain the rank and size but do not describe hosts."""
    if "PMI_RANK" in environ:
        advice = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
        rendezvous = master_address(environ, "PMI") or NoRendezvous(advice)
        return read_placement(environ, "PMI", rendezvous, "PMI_RANK", "PMI_SIZE")
    if "PMIX_RANK" in environ:
        raise LaunchError(
            f"a PMIx launcher started this process as rank {environ['PMIX_RANK']}, but no environment "
            "variable contains the number of ranks; use mpirun or srun, or set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        )
    return None


def _job_of_ancestor(*names: str) -> str:
    """Return a job name derived from the nearest ancestor process named in `names`, or else from the parent."""
    pid = os.getppid()
    while pid > 1:
        try:
            name, parent, started = _process(pid)
        except (OSError, ValueError):  # no /proc, or an ancestor outside this container
            break
        if name in names:
            return f"{name}-{pid}-{started}"  # with the start time, because process ids are reused
        pid = parent
    return f"parent-{os.getppid()}"


def _process(pid: int) -> tuple[str, int, int]:
    """Return the name, parent id and start time (in clock ticks since boot) of a process; see proc(5)."""
    text = Path(f"/proc/{pid}/stat").read_text()
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, int(fields[1]), int(fields[19])


# ---- Slurm ----


def _slurm(environ: Mapping[str, str]) -> Placement | None:
    """Read the variables of a task started by srun."""
    # See "Output environment variables" in https://slurm.schedmd.com/srun.html.  In a script that sbatch has started
    # directly, SLURM_PROCID is 0.
    is_batch_script = environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ
    if "SLURM_PROCID" not in environ or is_batch_script:
        return None
    tasks = tasks_per_node(
        environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    )
    node = int(environ.get("SLURM_NODEID", "0"))
    local_size = str(tasks[node]) if node < len(tasks) else ""
    size = next((n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if n in environ), "SLURM_NPROCS")
    rendezvous = master_address(environ, "srun (Slurm)") or _slurm_rendezvous(environ)
    names = ("SLURM_PROCID", size, "SLURM_LOCALID", "tasks on this node")
    return read_placement({**environ, "tasks on this node": local_size}, "srun (Slurm)", rendezvous, *names)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("gpu[007-009,12]-ib,login"), first_host("alpha,beta")
    ('gpu007-ib', 'alpha')
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]


def tasks_per_node(counts: str) -> list[int]:
    """Return the number of tasks on each node, decoded from Slurm's run-length encoding.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    tasks: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(repeat or 1)
    return tasks


def _slurm_rendezvous(environ: Mapping[str, str]) -> Rendezvous:
    """Return the rendezvous of a job step; on several hosts, derive a port from the job and step ids."""
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    node_lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in node_lists if name in environ), "")
    if not job.isdecimal() or not nodes:
        raise LaunchError(
            f"srun (Slurm) started this process (SLURM_PROCID={environ['SLURM_PROCID']}) without valid variables "
            f"for its job and hosts (SLURM_JOB_ID={job!r}, SLURM_STEP_NODELIST={nodes!r}); "
            f"set MASTER_ADDR and MASTER_PORT"
        )
    if not re.search(r"[\[,]", nodes):
        return SameHost(f"slurm-{job}.{step}")
    offset = int(job) * 101 + (int(step) if step.isdecimal() else 0)
    return Address(first_host(nodes), FIRST_PORT + offset % PORTS)


LAUNCHERS = (_torchrun, _open_mpi, _hydra, _slurm, _pmi)
