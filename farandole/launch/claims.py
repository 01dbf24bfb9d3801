"""Which processors the jobs of a host keep their ranks to, so that two jobs do not take the same ones.

A job claims a processor by holding a name in Linux's *abstract* socket space: one holder at a time, whoever
the user is, nothing on disk, and the kernel takes it back when the launcher ends in whatever way (its
ranks end with it).  What is claimed is advice: no process is kept from any processor.  Containers with a
network of their own have a space of names of their own, and do not see each other's claims.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import time
from collections.abc import Collection, Iterator

LOCK_S = 2.0
"""How long to wait, in seconds, for another launcher that is just taking its processors."""


class Claims:
    """The processors that this job holds, until `close` or the end of the process.

    with claim(range(8)) as claims:  # all that are free
        claims.keep({2, 3})          # gives the others back
    ...
    claims.close()
    """

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self.taken: set[int] = set()
        """The processors that other jobs have claimed."""
        self.blind: OSError | None = None
        """Why the claims of other jobs could not be seen, if so."""

    @property
    def held(self) -> frozenset[int]:
        """The processors that this job has claimed."""
        return frozenset(self._sockets)

    def take(self, processors: Collection[int]) -> None:
        """Claim those that nobody else has."""
        for processor in sorted(processors):
            try:
                self._sockets[processor] = _hold(f"processor {processor}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    self.blind = error
                    return
                self.taken.add(processor)

    def keep(self, processors: Collection[int]) -> None:
        """Give back all but these."""
        for processor in self.held.difference(processors):
            self._sockets.pop(processor).close()

    def close(self) -> None:
        """Give all back."""
        self.keep(())


@contextlib.contextmanager
def claim(processors: Collection[int]) -> Iterator[Claims]:
    """Hold those of `processors` that are free, one launcher at a time; the block decides which to `keep`."""
    claims = Claims()
    if sys.platform != "linux":
        yield claims
        return
    with _lock():
        claims.take(processors)
        try:
            yield claims
        except BaseException:
            claims.close()
            raise


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Keep two jobs that start at once from taking half of what each needs."""
    deadline = time.monotonic() + LOCK_S
    held = None
    while held is None and time.monotonic() < deadline:
        try:
            held = _hold("lock")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                break  # nor can the processors be claimed, which is said
            time.sleep(0.01)
    try:
        yield
    finally:
        if held is not None:
            held.close()


def _hold(name: str) -> socket.socket:
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0farandole-{name}")
    except OSError:
        held.close()
        raise
    return held
