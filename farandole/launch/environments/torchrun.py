"""torchrun, our own launcher (both are torch's elastic agent), and hand-set variables of that kind.

https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from collections.abc import Mapping

from farandole.launch.placement import LaunchError, Placement, TorchVariables, read_placement

OUR_RUNS = "farandole-"
"""How the run ids of `farandole launch` begin; the agent hands them to its ranks."""


def placement(environ: Mapping[str, str]) -> Placement | None:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    found = read_placement(
        environ,
        _launcher(environ),
        TorchVariables(),
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
    )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing and found.size > 1:
        raise LaunchError(
            f"rank {found.rank} of {found.size} is told where to meet the others by MASTER_ADDR and "
            f"MASTER_PORT; not set: {' and '.join(missing)}"
        )
    return found


def _launcher(environ: Mapping[str, str]) -> str:
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return "environment variables"
    return "farandole launch" if run.startswith(OUR_RUNS) else "torchrun"
