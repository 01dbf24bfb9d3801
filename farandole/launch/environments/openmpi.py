"""Open MPI: mpirun with PMIx (PRRTE since version 5, ORTE before)."""

from __future__ import annotations

from collections.abc import Mapping

from farandole.launch.environments.ancestry import job_of_ancestor
from farandole.launch.placement import NoMeeting, Placement, SameHost, chosen_address, read_placement

ADVICE = (
    "tell them where rank 0 runs: mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 ... "
    "(started on the first host)"
)


def placement(environ: Mapping[str, str]) -> Placement | None:
    """Read OMPI_COMM_WORLD_RANK and its kin."""
    if "OMPI_COMM_WORLD_RANK" not in environ and "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    one_host = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environ.get("OMPI_COMM_WORLD_SIZE")
    meeting = chosen_address(environ, "mpirun (Open MPI)") or (
        SameHost(_job(environ)) if one_host else NoMeeting(ADVICE)
    )
    return read_placement(
        environ,
        "mpirun (Open MPI)",
        meeting,
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )


def _job(environ: Mapping[str, str]) -> str:
    """The job's PMIx name space, which holds the process id of its mpirun."""
    return environ.get("PMIX_NAMESPACE") or job_of_ancestor("mpirun", "orterun", "orted", "prterun", "prted")
