"""MPI as a backend of `torch.distributed`, on stock wheels: whichever MPI mpi4py has loaded.

    mpiexec -n 4 python script.py       # where the script says init_process_group("farandole-mpi")

No import is needed for that.  `enable()` gives the name `mpi` itself, which torch keeps for builds of its own.
`Communicator.from_mpi(comm)` takes a communicator of mpi4py.  docs/guides/mpi.md tells how to use it.
"""

from farandole.comm.mpi.backend import enable
from farandole.comm.mpi.transport import MpiTransport

__all__ = ["MpiTransport", "enable"]
