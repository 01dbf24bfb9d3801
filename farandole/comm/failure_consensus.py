"""Agreement among all hosts on the cause of a group's failure.

Within a host, shared memory holds the cause.  Between hosts, a closed connection does not reveal why it was closed.
The rank that detects a failure therefore writes the cause to the group's store, unless the store already contains a
cause.  The rank then notifies all connected ranks on other hosts.  A rank that is notified, or that finds a
connection closed, reads the cause from the store.  A rank that leaves the group also records this in the store.

The store may be unreachable, so a rank waits at most `PATIENCE_S` for an answer.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from farandole.comm import errors
from farandole.comm.errors import CommunicationError, RankLeft

PATIENCE_S = 1.2
CLOSED_S = 0.3
"""Seconds to wait for the cause of a closed connection.

A rank that leaves or reports a failure publishes the reason before its connections are closed.  If a rank has died, its
connections are closed first; the other ranks on its host detect the death within 0.05 s and then publish the cause.
"""
_POLL_S = 0.05
_KEY = "failure"
_LEAVING = "leaving"

Answer = TypeVar("Answer")


class FailureConsensus:
    """Publishes a group's failure in the store, and reads the failure that another rank published."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def publish(self, error: CommunicationError) -> CommunicationError:
        """Publish `error` unless another failure is already published; return the published failure."""
        own = json.dumps({"kind": type(error).__name__, "text": str(error)})
        found = self._ask(lambda: self._store.compare_set(_KEY, "", own))
        return error if found is None or _as_bytes(found) == own.encode() else _to_error(_as_bytes(found))

    def find(self, gone: int | None) -> CommunicationError | None:
        """Wait briefly for another rank to publish a failure; return the failure.

        Args:
            gone: The rank whose connection was closed, or None.

        Returns:
            The published failure, a `RankLeft` if rank `gone` has left the group, or None if neither is found in time.
        """

        wait_s = PATIENCE_S - _POLL_S if gone is None else CLOSED_S

        def poll() -> bytes | CommunicationError | None:
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                if self._store.check([_KEY]):
                    return self._store.get(_KEY)
                if gone is not None and self._store.check([f"left/{gone}"]):
                    return RankLeft(self._store.get(f"left/{gone}").decode())
                time.sleep(_POLL_S)
            return None

        found = self._ask(poll)
        return _to_error(found) if isinstance(found, bytes) else found

    def leave(self, words: str) -> None:
        """Publish that this rank is leaving the group, with `words` as the error message for other ranks.

        The last rank to leave deletes the group's keys from the store.
        """

        def publish() -> None:
            self._store.set(f"left/{self._rank}", words)
            if self._store.add(_LEAVING, 1) == self._size:
                for key in (_KEY, _LEAVING, *(f"left/{rank}" for rank in range(self._size))):
                    self._store.delete_key(key)

        self._ask(publish)

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """Return the result of `question`, or None if the store does not answer within `PATIENCE_S`."""
        answers: list[Answer] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # the store is unreachable
                answers.append(question())

        thread = threading.Thread(target=run, name="farandole-consensus", daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        return answers[0] if answers else None


def _as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _to_error(record: bytes) -> CommunicationError:
    fields = json.loads(record)
    kind = getattr(errors, fields["kind"], CommunicationError)
    error: CommunicationError = kind(fields["text"])
    return error
