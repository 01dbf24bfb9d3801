"""Invalidation of groups in a forked process, which cannot use the groups of its parent.

A child has copies of its parent's sockets and mappings but none of its threads.  A call in the child would write to the
parent's slot in shared memory, and a socket that the child keeps open would hide the parent's death from other hosts.
A fork therefore invalidates every group of the child and closes its copies of the sockets.  Tensors in shared memory
stay readable.  The child may create its own groups.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object that a forked child must not use."""

    def invalidate(self, reason: str) -> None:
        """Make later calls fail with this reason; called in the child, in which no other thread runs."""


_registered: weakref.WeakSet[Forked] = weakref.WeakSet()


def invalidate_after_fork(item: Forked) -> None:
    """Call `item.invalidate` in every child that is forked later."""
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
