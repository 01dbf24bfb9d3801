"""Host identity, shared memory files, and the exchange of texts before ranks are connected."""

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
    """Return a text that is equal for two processes exactly if they share a kernel, all namespaces and a user.

    Containers and network namespaces of one machine count as different hosts: tests use them as hosts, and a process id
    is not valid in another process namespace.
    """
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "uts")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ":".join([boot, platform.node(), str(os.geteuid()), *namespaces])


@dataclass(frozen=True)
class SegmentName:
    """The process and the descriptor that hold a memory file open, and the inode of the file."""

    pid: int
    descriptor: int
    inode: int


class Segment:
    """An anonymous memory file (`memfd_create`) that this process keeps open until `close`.

    The file has no name that could remain after a crash.  Other processes of the same user open the file through
    `/proc/<owner>/fd/`.
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
        """The name with which other processes open the file."""
        return SegmentName(os.getpid(), self.descriptor, os.fstat(self.descriptor).st_ino)

    def close(self) -> None:
        """Close the descriptor; mappings of the memory stay."""
        os.close(self.descriptor)


def open_segment(name: SegmentName) -> int:
    """Return a descriptor of another process's memory file.

    Raises:
        OSError: The file does not exist, is not accessible, or belongs to another user (root may open any file).
    """
    descriptor = os.open(f"/proc/{name.pid}/fd/{name.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    found, user = os.fstat(descriptor), os.geteuid()
    if found.st_ino != name.inode or found.st_uid != user:
        os.close(descriptor)
        if found.st_ino != name.inode:
            raise OSError(f"process {name.pid} has closed the shared memory that it announced")
        raise OSError(
            f"cannot map the memory of process {name.pid}: expected user {user} as its owner, got user {found.st_uid}"
        )
    return descriptor


def open_and_map(name: SegmentName, size: int) -> mmap.mmap:
    """Map `size` bytes of another process's memory file for reading and writing; raise OSError as `open_segment`."""
    descriptor = open_segment(name)
    try:
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


class Rendezvous:
    """Exchange of texts among the ranks of a job through a store.

    torchrun keeps one store for a job, so a later group with the same name may use the same store.  Every key therefore
    has a number, which each rank counts in the store.  Rank 0 collects the texts, so the traffic is linear in the
    number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, who: str) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._who = who
        number = store.add(f"rendezvous/{rank}", 1)
        self.store = dist.PrefixStore(f"rendezvous-{number}/", store)

    def exchange(self, topic: str, text: str) -> list[str]:
        """All-gather a text; raise `RankLate` if a rank does not arrive in time."""
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
                f"cannot create {self._who}: of its {self._size} ranks, rank {', '.join(missing)} did not arrive within "
                f"the timeout of {self._timeout.total_seconds():g} s"
            ) from error
        texts = json.loads(self.store.get(everything))
        return texts
