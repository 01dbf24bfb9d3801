"""Which launcher started this process, and where it placed it: one small file per launcher.

Each module has one function `placement(environ)`: a `Placement`, or None where its launcher's variables
are not there.  They are asked in an order in which the innermost launcher answers first: torchrun
started by srun is torchrun, mpirun inside a Slurm allocation is mpirun (whose helper processes srun
numbers differently), and srun with a PMI of its own is srun.
"""

from __future__ import annotations

from collections.abc import Mapping

from farandole.launch.environments import hydra, openmpi, pmi, slurm, torchrun
from farandole.launch.placement import ALONE, Placement

LAUNCHERS = {
    "torchrun": torchrun.placement,
    "Open MPI": openmpi.placement,
    "Hydra": hydra.placement,
    "Slurm": slurm.placement,
    "PMI": pmi.placement,
}


def find_placement(environ: Mapping[str, str]) -> Placement:
    """The placement that `environ` describes; alone, a world of one, where no launcher is found.

    find_placement({"RANK": "1", "WORLD_SIZE": "2", ...}).rank == 1
    find_placement({}).launcher == "alone"
    """
    for placement in LAUNCHERS.values():
        found = placement(environ)
        if found is not None:
            return found
    return ALONE
