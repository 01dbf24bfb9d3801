"""Hydra: the mpiexec of MPICH, MVAPICH and Intel MPI.

It gives PMI_RANK and PMI_SIZE, as every PMI does, and the local numbers in variables of its own.  Nothing
in them names the job, but on each host all its ranks descend from one `hydra_pmi_proxy`.
"""

from __future__ import annotations

from collections.abc import Mapping

from farandole.launch.environments.ancestry import job_of_ancestor
from farandole.launch.placement import NoMeeting, Placement, SameHost, chosen_address, read_placement

ADVICE = (
    "tell them where rank 0 runs: mpiexec -genv MASTER_ADDR $(hostname) -genv MASTER_PORT 29500 ... "
    "(started on the first host)"
)


def placement(environ: Mapping[str, str]) -> Placement | None:
    """Read PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS."""
    if "MPI_LOCALRANKID" not in environ or "PMI_RANK" not in environ:
        return None
    one_host = environ.get("MPI_LOCALNRANKS") == environ.get("PMI_SIZE")
    meeting = chosen_address(environ, "mpirun (Hydra)") or (
        SameHost(job_of_ancestor("hydra_pmi_proxy")) if one_host else NoMeeting(ADVICE)
    )
    return read_placement(
        environ,
        "mpirun (Hydra)",
        meeting,
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    )
