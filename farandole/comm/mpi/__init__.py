"""An MPI backend for `torch.distributed` that works with the standard torch wheels and uses mpi4py's MPI library.

    mpiexec -n 4 python script.py       # the script calls init_process_group("farandole-mpi")

The script does not need to import this package.  `enable()` provides the backend name `mpi`, which torch reserves for
builds with MPI.  `Communicator.from_mpi(comm)` accepts an mpi4py communicator.  See docs/guides/mpi.md.
"""

from farandole.comm.mpi.backend import enable
from farandole.comm.mpi.transport import MpiTransport

__all__ = ["MpiTransport", "enable"]
