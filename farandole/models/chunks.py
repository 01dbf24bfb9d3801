"""Iterate over a dimension in chunks, and shorten such loops in dry runs.

    for chunk in chunks(len(logits), rows, like=logits):
        total += loss(logits[chunk])

In a dry run, tensors are fake (`FakeTensor`), and chunks of the same size have the same cost.  Therefore, the loop
body runs only once for all complete chunks.  During this run, `repetitions()` returns the number of complete
chunks, and the dry run multiplies its counts of operations and transfers by this number.  The loop body must not
collect per-chunk tensors or other results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_factors = [1]


def repetitions() -> int:
    """Return the number of iterations that the current iteration of `chunks` represents; 1 outside of `chunks`."""
    return _factors[-1]


def chunks(length: int, size: int, like: Tensor) -> Iterator[slice]:
    """Yield slices of `size` elements that cover a dimension of `length` elements.  The last slice may be shorter.

    `like` is any tensor of the computation.  If `like` is fake, the first chunk represents all complete chunks.
    """
    if not isinstance(like, FakeTensor):
        yield from (slice(start, min(start + size, length)) for start in range(0, length, size))
        return
    complete, rest = divmod(length, size)
    if complete:
        with _repeated(complete):
            yield slice(0, size)
    if rest:
        yield slice(complete * size, length)


@contextmanager
def _repeated(times: int) -> Iterator[None]:
    _factors.append(_factors[-1] * times)
    try:
        yield
    finally:
        _factors.pop()
