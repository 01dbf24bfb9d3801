"""The calls of the C core (native/core.h) over MPI, for one group.

They take addresses and counts, return 0 (or `Status.PENDING`, or the error, for a message) or raise, and their
`flags` are those of farandole.native.  `handle` is the C core's; here the object itself knows its group.
"""

from __future__ import annotations

from farandole.comm.mpi.messages import Messages
from farandole.comm.mpi.moves import Moves
from farandole.comm.mpi.reductions import Reductions


class MpiCore(Reductions, Moves, Messages):
    """All calls, by the names of the C core."""
