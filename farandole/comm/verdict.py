"""Why a group of several hosts broke: one sentence, the same on all hosts.

Inside a host the shared segment carries the reason.  Between hosts there are connections, and all that a
closed connection says is that it is closed.  So whoever finds out a reason writes it into the store of the
group, if none is there yet, and closes its connections; whoever sees its connection closed looks into the
store.  A rank that leaves the group says so there, too.

The store may itself be gone, or behind the link that is down: nobody waits for it longer than `PATIENCE_S`.
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
_LOOK_S = 0.05
_KEY = "verdict"

Answer = TypeVar("Answer")


class Verdict:
    """The reason that all ranks of a group give."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def publish(self, error: CommunicationError) -> CommunicationError:
        """Give this reason, unless another one was given before; returns the one that holds."""
        mine = json.dumps({"kind": type(error).__name__, "text": str(error)})
        found = self._ask(lambda: self._store.compare_set(_KEY, "", mine))
        return error if found is None or _as_bytes(found) == mine.encode() else _to_error(_as_bytes(found))

    def find(self, gone: int | None) -> CommunicationError | None:
        """The reason that another rank gave, or will give in a moment; `gone`: the rank that closed its connection."""

        def look() -> bytes | CommunicationError | None:
            deadline = time.monotonic() + PATIENCE_S - _LOOK_S
            while time.monotonic() < deadline:
                if self._store.check([_KEY]):
                    return self._store.get(_KEY)
                if gone is not None and self._store.check([f"left/{gone}"]):
                    return RankLeft(self._store.get(f"left/{gone}").decode())
                time.sleep(_LOOK_S)
            return None

        found = self._ask(look)
        return _to_error(found) if isinstance(found, bytes) else found

    def leave(self, words: str) -> None:
        """Say that this rank leaves, and how, in a sentence."""
        self._ask(lambda: self._store.set(f"left/{self._rank}", words))

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """What the store answers; None if it does not in time."""
        answers: list[Answer] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone: nobody has the answer
                answers.append(question())

        thread = threading.Thread(target=run, name="farandole-verdict", daemon=True)
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
