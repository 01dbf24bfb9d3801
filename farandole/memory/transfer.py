"""Work that threads do with a record: what is waited for, and how its parts and what must come before count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait

from farandole.memory.errors import OffloadError


class Transfer:
    """A record on its way between a disk and memory, in `parts` that threads move.

    Until it is `done` its buffer must not be touched.
    """

    def __init__(self, parts: int) -> None:
        self._left = parts
        self._error: OffloadError | None = None
        self._lock = threading.Lock()
        self._future: Future[None] = Future()
        if parts == 0:
            self._future.set_result(None)

    @property
    def done(self) -> bool:
        """Whether nothing moves any more, for good or bad."""
        return self._future.done()

    @property
    def error(self) -> OffloadError | None:
        """What went wrong, once it is done."""
        return self._error if self.done else None

    def wait(self) -> None:
        """Return when it is done.  Raises `OffloadError`, naming the record, if it could not be done."""
        self._future.result()

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called when it is done, for good or bad: by the thread that ends it, or at once."""
        self._future.add_done_callback(lambda _: call())

    def end_part(self, error: OffloadError | None = None) -> None:
        """A part is at rest."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
        if self._error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(self._error)

    @staticmethod
    def settle(transfers: Iterable[Transfer]) -> None:
        """Return when all are done, for good or bad."""
        wait([transfer._future for transfer in transfers])


def after_all(transfers: Iterable[Transfer], call: Callable[[], None]) -> None:
    """Have `call` called when all of `transfers` are done, for good or bad."""
    waiting = [transfer for transfer in transfers if not transfer.done]
    left = len(waiting)
    lock = threading.Lock()

    def one_less() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            call()

    if not waiting:
        call()
    for transfer in waiting:
        transfer.then(one_less)
