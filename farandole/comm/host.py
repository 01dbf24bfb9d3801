"""Which ranks share a host, and how they get hold of each other's memory.

A rank publishes through the store of its group who it is; ranks with equal host identities can share
memory.  A segment is an anonymous file (`memfd_create`): it has no name that could be left behind, and
the others open it through `/proc/<owner>/fd/`, which the kernel allows to the same user only.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from farandole.comm.errors import RankLate


@functools.cache
def host_identity() -> str:
    """Equal for two processes exactly if they run under one kernel, in one set of namespaces, as one user.

    Containers and network namespaces of one machine count as different hosts: they stand for hosts in
    tests, and processes of another process namespace cannot be found by their number.
    """
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "uts")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ":".join([boot, platform.node(), str(os.geteuid()), *namespaces])


@dataclass(frozen=True)
class SegmentName:
    """Where the owner of a segment keeps it open, and which file that is."""

    pid: int
    descriptor: int
    inode: int


class Segment:
    """An anonymous piece of shared memory that this process owns until `close`."""

    def __init__(self, size: int, label: str) -> None:
        self.descriptor = os.memfd_create(f"farandole-{label}", os.MFD_CLOEXEC)
        try:
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, size)
        except OSError:
            os.close(self.descriptor)
            raise

    def resize(self, size: int) -> None:
        """Make it `size` bytes long."""
        os.ftruncate(self.descriptor, size)

    @property
    def name(self) -> SegmentName:
        """What other ranks need to open it."""
        return SegmentName(os.getpid(), self.descriptor, os.fstat(self.descriptor).st_ino)

    def close(self) -> None:
        """Close the descriptor; mappings of the memory stay."""
        os.close(self.descriptor)


def open_segment(name: SegmentName) -> int:
    """A descriptor of another process's segment.  OSError if it is not there or not ours to open."""
    descriptor = os.open(f"/proc/{name.pid}/fd/{name.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(descriptor).st_ino != name.inode:
        os.close(descriptor)
        raise OSError(f"process {name.pid} no longer has the segment that it announced")
    return descriptor


def open_and_map(name: SegmentName, size: int) -> mmap.mmap:
    """Map `size` bytes of another process's segment for reading and writing.  OSError as in `open_segment`."""
    descriptor = open_segment(name)
    try:
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Peer:
    """What a rank tells the others of its group."""

    host: str
    name: str
    pid: int
    segment: SegmentName | None


class Meeting:
    """The ranks of a group tell each other things through the store of the group, before they share memory.

    A store may outlive a group, and a group of the same name meet there again (torchrun keeps one store for
    a job), so that every key carries the number of the meeting, which each rank counts in the store.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, who: str) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._who = who
        number = store.add(f"meetings/{rank}", 1)
        self.store = dist.PrefixStore(f"meeting-{number}/", store)

    def exchange(self, topic: str, text: str) -> list[str]:
        """All-gather a text.  `RankLate` if a rank does not come in time."""
        keys = [f"{topic}/{rank}" for rank in range(self._size)]
        self.store.set(keys[self._rank], text or " ")
        try:
            self.store.wait(keys, self._timeout)
        except dist.DistStoreError as error:
            missing = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
            raise RankLate(
                f"{self._who} could not be made: of its {self._size} ranks, number {', '.join(missing)} did not "
                f"come within {self._timeout.total_seconds():g} s"
            ) from error
        return [self.store.get(key).decode().strip() for key in keys]

    def exchange_peers(self, mine: Peer) -> list[Peer]:
        """Every rank's `Peer`, in rank order."""
        peers = []
        for text in self.exchange("peer", json.dumps(asdict(mine))):
            fields = json.loads(text)
            segment = fields.pop("segment")
            peers.append(Peer(**fields, segment=None if segment is None else SegmentName(**segment)))
        return peers


class Processes:
    """Descriptors on which the kernel says that a process has ended; one per process, shared by all groups."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}
        self._users: dict[int, int] = {}

    def watch(self, pids: Sequence[int]) -> list[int]:
        """A descriptor for each process (-1 for this one).  OSError if a process is gone already."""
        for pid in pids:
            if pid == os.getpid():
                continue
            if pid not in self._descriptors:
                self._descriptors[pid] = os.pidfd_open(pid)
            self._users[pid] = self._users.get(pid, 0) + 1
        return [self._descriptors.get(pid, -1) for pid in pids]

    def unwatch(self, pids: Sequence[int]) -> None:
        """Undo one `watch` of the same processes."""
        for pid in pids:
            if pid not in self._users:
                continue
            self._users[pid] -= 1
            if not self._users[pid]:
                del self._users[pid]
                os.close(self._descriptors.pop(pid))
