"""MPI as a backend of `torch.distributed` on stock wheels, with the MPI library that mpi4py has loaded.

    mpiexec -n 4 python script.py       # the script calls init_process_group("farandole-mpi")

The script needs no import of this package.  `enable()` provides the name `mpi`, which torch reserves for its own MPI
builds.  `Communicator.from_mpi(comm)` takes a communicator of mpi4py.  See docs/guides/mpi.md.
"""

from farandole.comm.mpi.backend import enable
from farandole.comm.mpi.transport import MpiTransport

__all__ = ["MpiTransport", "enable"]
