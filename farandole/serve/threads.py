"""Limit the number of threads that torch uses in a step.

The C core and torch use separate threads.  After each operation, torch's OpenMP threads spin for milliseconds, and take
processor cores from the threads of the C core: a step with two threads would take longer than a step with one thread.
Therefore, torch uses one thread in a step, except for large matrix products that the C core does not compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from farandole import native

_count: ContextVar[int | None] = ContextVar("threads of the core", default=None)


@contextlib.contextmanager
def core_threads() -> Iterator[None]:
    """Return a context manager that limits torch to one thread.

    Within the context, the C core uses as many threads as torch used before.
    """
    count = torch.get_num_threads()
    if count == 1 or not native.available():
        yield
        return
    token = _count.set(count)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _count.reset(token)


@contextlib.contextmanager
def torch_threads() -> Iterator[None]:
    """Return a context manager that restores torch's thread count for a large operation within `core_threads`."""
    count = _count.get()
    if count is None:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def thread_count() -> int:
    """Return the number of threads that the C core uses."""
    return _count.get() or torch.get_num_threads()
