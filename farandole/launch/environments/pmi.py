"""Any other PMI: a rank and a size, and no word about hosts."""

from __future__ import annotations

from collections.abc import Mapping

from farandole.launch.placement import LaunchError, NoMeeting, Placement, chosen_address, read_placement

ADVICE = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"


def placement(environ: Mapping[str, str]) -> Placement | None:
    """Read PMI_RANK and PMI_SIZE; a PMIx rank without a size is refused with what to do."""
    if "PMI_RANK" in environ:
        meeting = chosen_address(environ, "PMI") or NoMeeting(ADVICE)
        return read_placement(environ, "PMI", meeting, rank="PMI_RANK", size="PMI_SIZE")
    if "PMIX_RANK" in environ:
        raise LaunchError(
            f"a PMIx launcher started this process as rank {environ['PMIX_RANK']}, and no variable says of "
            f"how many; use mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    return None
