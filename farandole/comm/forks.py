"""Groups in a forked process: the child has none of its parent's.

A child has copies of its parent's sockets and mappings, but none of its threads.  A call in the child would write into
the parent's place in shared memory, and a socket that the child keeps open hides the parent's death from other hosts.
So at a fork every group of the child becomes invalid, and its copies of sockets are closed.  Tensors in shared memory
stay readable.  The child may make groups of its own.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object that the child of a fork must not use as its parent does."""

    def invalidate(self, reason: str) -> None:
        """Refuse calls from now on, for this reason; called in the child, in which no other thread runs."""


_registered: weakref.WeakSet[Forked] = weakref.WeakSet()


def invalidate_after_fork(item: Forked) -> None:
    """Have `item.invalidate` called in every child that is forked from now on."""
    _registered.add(item)


def _in_child() -> None:
    reason = (
        f"process {os.getpid()} was forked from process {os.getppid()} and cannot use its groups; destroy this group and "
        f"create a new one here, or start the process with spawn"
    )
    inherited = list(_registered)
    _registered.clear()
    for item in inherited:
        item.invalidate(reason)


os.register_at_fork(after_in_child=_in_child)
