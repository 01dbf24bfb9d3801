"""MPI as a backend of `torch.distributed`, on stock wheels: whichever MPI mpi4py has loaded.

    mpiexec -n 4 python script.py       # where the script says init_process_group("farandole-mpi")

Nothing is imported for that.  `enable()` gives the name `mpi` itself, which torch keeps for builds of its own.
docs/mpi.md tells how to use it.
"""

from farandole.comm.mpi.named_mpi import enable
from farandole.comm.mpi.transport import MpiTransport

__all__ = ["MpiTransport", "enable"]
