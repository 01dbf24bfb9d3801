"""Host identity, shared memory files, and text exchange during bootstrap."""

from __future__ import annotations

import functools
import json
import mmap
import os
import platform
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from farandole.comm.errors import RankLate


@functools.cache
def host_identity() -> str:
    """Return a string that identifies this host.

    The string is equal for processes with the same kernel, the same user, and the same PID, network and UTS
    namespaces.  Containers on one machine count as different hosts, because a process ID is valid only in its PID
    namespace.  Tests use namespaces to simulate hosts.
    """
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "uts")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ":".join([boot, platform.node(), str(os.geteuid()), *namespaces])


@dataclass(frozen=True)
class SegmentName:
    """Identifies a memory file by a process, the descriptor of the file in that process, and the file's inode."""

    pid: int
    descriptor: int
    inode: int


class Segment:
    """An anonymous memory file (`memfd_create`) that this process keeps open until `close`.

    The file has no path, so no file remains after a crash.  Other processes of the same user open the file through
    `/proc/PID/fd`.
    """

    def __init__(self, size: int, label: str) -> None:
        self.descriptor = os.memfd_create(f"farandole-{label}", os.MFD_CLOEXEC)
        try:
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, size)
        except OSError:
            os.close(self.descriptor)
            raise

    @property
    def name(self) -> SegmentName:
        """The name by which other processes open the file."""
        return SegmentName(os.getpid(), self.descriptor, os.fstat(self.descriptor).st_ino)

    def close(self) -> None:
        """Close the descriptor; existing mappings remain valid."""
        os.close(self.descriptor)


def open_segment(name: SegmentName) -> int:
    """Return a descriptor for another process's memory file.

    Raises:
        OSError: if the file does not exist, is not accessible, or belongs to another user.  (Without the ownership
            check, root could open any user's file.)
    """
    descriptor = os.open(f"/proc/{name.pid}/fd/{name.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    found, user = os.fstat(descriptor), os.geteuid()
    if found.st_ino != name.inode or found.st_uid != user:
        os.close(descriptor)
        if found.st_ino != name.inode:
            raise OSError(
                f"cannot map the memory of process {name.pid}: the process has closed the file; check whether the "
                "process failed"
            )
        raise OSError(
            f"cannot map the memory of process {name.pid}: expected the owner to be user {user}, got user "
            f"{found.st_uid}; run all ranks as one user"
        )
    return descriptor


def open_and_map(name: SegmentName, size: int) -> mmap.mmap:
    """Map `size` bytes of another process's memory file for reading and writing; raise OSError like `open_segment`."""
    descriptor = open_segment(name)
    try:
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


class Rendezvous:
    """All-gathers strings among the ranks of a job through a store.

    torchrun uses one store for the whole job, so several rendezvous may use the same store with the same prefix.
    Each rank therefore numbers its rendezvous with a counter in the store, and the keys contain this number.  Rank 0
    collects the strings, so the number of requests to the store is linear in the number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, who: str) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._who = who
        number = store.add(f"rendezvous/{rank}", 1)
        self.store = dist.PrefixStore(f"rendezvous-{number}/", store)

    def exchange(self, topic: str, text: str) -> list[str]:
        """All-gather one string per rank, and return the strings in rank order.

        Raises:
            RankLate: if a rank did not arrive before the timeout.
        """
        keys = [f"{topic}/{rank}" for rank in range(self._size)]
        everything = f"{topic}/all"
        if self._rank:
            self.store.set(keys[self._rank], text or " ")
        try:
            if self._rank == 0:
                self.store.wait(keys[1:], self._timeout)
                texts = [text, *(self.store.get(key).decode().strip() for key in keys[1:])]
                self.store.set(everything, json.dumps(texts))
                return texts
            self.store.wait([everything], self._timeout)
        except dist.DistStoreError as error:
            missing = [
                str(rank)
                for rank, key in enumerate(keys)
                if rank != self._rank and not self.store.check([key if rank else everything])
            ]
            raise RankLate(
                f"cannot create {self._who}: {'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)} of "
                f"{self._size} did not arrive within the timeout of {self._timeout.total_seconds():g} s; check that "
                "these ranks are running, or increase the timeout"
            ) from error
        texts = json.loads(self.store.get(everything))
        return texts
