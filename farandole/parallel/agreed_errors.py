"""Raise an error on all ranks if local work fails on any rank, so that no rank waits for a failed rank.

with agreed_errors(comm):
    check(model)        # local work, which may fail on some ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from farandole.comm.communicator import Communicator
from farandole.plan import PlanError

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (PlanError, ValueError, TypeError, RuntimeError)
}
"""The error types that are preserved: all ranks raise the same type.  Other types become a `RuntimeError`."""


@contextmanager
def agreed_errors(comm: Communicator) -> Iterator[None]:
    """Raise an error on all ranks if the block fails on any rank.

    All ranks must enter the context, and the block must not communicate.  If all ranks fail with the same error, each
    rank raises its own exception.  Otherwise, the message names the lowest rank that failed.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    found = [_description(own)] if comm.size == 1 else comm.all_gather_object(_description(own))
    failed = next(((rank, each) for rank, each in enumerate(found) if each is not None), None)
    if failed is None:
        return
    if own is not None and all(each == found[0] for each in found):
        raise own
    rank, (kind, message) = failed
    if kind not in _KINDS:
        message = f"{kind}: {message}"
    raise _KINDS.get(kind, RuntimeError)(f"rank {rank}: {message}") from own


def _description(error: Exception | None) -> tuple[str, str] | None:
    """Return the name of the error's type, or of its base type in `_KINDS` if any, and the message."""
    if error is None:
        return None
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), type(error).__name__)
    return kind, str(error)
