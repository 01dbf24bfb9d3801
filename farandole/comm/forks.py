"""Invalidates groups in forked processes, which cannot use the groups of their parent.

A child has copies of its parent's sockets and mappings, but none of the parent's threads.  Calls in the child would
write to the parent's slot in shared memory, and open sockets in the child would hide the parent's death from other
hosts.  A fork therefore invalidates all groups in the child and closes the inherited sockets.  Tensors in shared memory
remain readable, and the child may create new groups.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object that must not be used in a forked child."""

    def invalidate(self, reason: str) -> None:
        """Make all later calls fail with the message `reason`.

        This is called in the child while it has only one thread.
        """


_registered: weakref.WeakSet[Forked] = weakref.WeakSet()


def invalidate_after_fork(item: Forked) -> None:
    """Register `item` so that every child forked later calls `item.invalidate`."""
    _registered.add(item)


def _in_child() -> None:
    reason = (
        f"process {os.getpid()} was forked from process {os.getppid()} and cannot use the groups of that process; "
        "destroy this group and create a new group in this process, or start the process with the "
        "multiprocessing method 'spawn'"
    )
    inherited = list(_registered)
    _registered.clear()
    for item in inherited:
        item.invalidate(reason)


os.register_at_fork(after_in_child=_in_child)
