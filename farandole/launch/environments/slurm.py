"""Slurm: the tasks of a job step that srun started.

https://slurm.schedmd.com/srun.html, "Output environment variables".  Slurm names the step's hosts, so that
ranks on several hosts can meet without the user's help: on the first one, at a port that follows from the
numbers of the job and of its step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from farandole.launch.placement import (
    Address,
    LaunchError,
    Meeting,
    Placement,
    SameHost,
    chosen_address,
    read_placement,
)

FIRST_PORT, PORTS = 10_000, 20_000
"""Ports below those that Linux hands out by itself (32768 and up)."""


def placement(environ: Mapping[str, str]) -> Placement | None:
    """Read SLURM_PROCID, the size of the step (or of the job) and SLURM_LOCALID."""
    if "SLURM_PROCID" not in environ or _is_batch_script(environ):
        return None
    size = next((n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if n in environ), "SLURM_NPROCS")
    local_size = _tasks_on_this_node(environ)
    return read_placement(
        {**environ, "tasks on this node": local_size},
        "srun (Slurm)",
        chosen_address(environ, "srun (Slurm)") or _meeting(environ),
        rank="SLURM_PROCID",
        size=size,
        local_rank="SLURM_LOCALID",
        local_size="tasks on this node",
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[007-009,12]-ib,login"), first_host("alpha,beta")
    ('gpu007-ib', 'alpha')
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]


def tasks_per_node(counts: str) -> list[int]:
    """Slurm's run-length list of the tasks on each node.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    tasks: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(repeat or 1)
    return tasks


def _is_batch_script(environ: Mapping[str, str]) -> bool:
    """The script given to sbatch carries the number 0 of a task, and is none: srun has not run yet."""
    return environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ


def _tasks_on_this_node(environ: Mapping[str, str]) -> str:
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    tasks = tasks_per_node(counts)
    node = int(environ.get("SLURM_NODEID", "0"))
    return str(tasks[node]) if node < len(tasks) else ""


def _meeting(environ: Mapping[str, str]) -> Meeting:
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    nodes = next(
        (environ[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if n in environ),
        "",
    )
    if not job.isdecimal() or not nodes:
        raise LaunchError(
            f"srun (Slurm) placed this process (SLURM_PROCID={environ['SLURM_PROCID']}) without saying in "
            f"which job or on which hosts (SLURM_JOB_ID={job!r}, SLURM_STEP_NODELIST={nodes!r}); "
            f"set MASTER_ADDR and MASTER_PORT"
        )
    if not re.search(r"[\[,]", nodes):
        return SameHost(f"slurm-{job}.{step}")
    offset = int(job) * 101 + (int(step) if step.isdecimal() else 0)
    return Address(first_host(nodes), FIRST_PORT + offset % PORTS)
