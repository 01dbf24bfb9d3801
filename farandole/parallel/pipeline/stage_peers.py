"""The ranks that compute a stage together, along the tensor, context and expert axes.

After an exception on one of these ranks, the other ranks may be waiting for the failed rank in a collective.  The
failed rank therefore leaves the groups of these axes.  The calls of the waiting ranks then raise `RankLeft`, so that
these ranks fail as well, and leave their groups.  Therefore no rank waits forever, and all ranks reach the end of the
step, where all of them raise `StageError` and create the groups again.

Groups that reduce gradients are separate, and remain in use.
"""

from __future__ import annotations

from farandole.parallel.axes import AxisCommunicator, Position
from farandole.plan import MODEL_AXES


class StagePeers:
    """The communicators of this rank along the tensor, context and expert axes.

    Args:
        position: the position of this rank, with connected communicators.
    """

    def __init__(self, position: Position) -> None:
        assert position.groups is not None
        self._comm = position.groups.comm
        along = [position.comm(axis) for axis in MODEL_AXES]
        self._comms: list[AxisCommunicator] = [*(comm for comm in along if comm), *position.parts()]
        self._left = False

    def __bool__(self) -> bool:
        """Return whether other ranks compute the same stages as this rank."""
        return bool(self._comms)

    def leave(self, note: str) -> None:
        """Leave all groups, so that waiting ranks raise `RankLeft` with `note`."""
        if not self._left:
            self._left = True
            for comm in self._comms:
                comm.abort(note)

    def reconnect(self) -> None:
        """Create all groups again.  All ranks of each group must call this method."""
        self._left = False
        for comm in self._comms:
            comm.reconnect(self._comm)
