"""The operations to measure: the buffers of each rank, and the amount of data that a rank's link must transfer.

In this module, S is the size in bytes that the tables show: the size of the larger of a rank's two buffers, input and
output.  `docs/guides/bench.md` derives the ratio of bus bandwidth to algorithm bandwidth for each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

ROOT = 0
"""The root of rooted collectives, and the rank that measures the time of point-to-point messages."""
WINDOW = 64
"""The number of messages that are outstanding at the same time in bandwidth tests."""

Extent = Literal["whole", "part", "none"]
"""The size of a buffer: "whole" is S, "part" is S divided by the number of ranks, and "none" is zero."""


@dataclass(frozen=True)
class Operation:
    """A collective, or a point-to-point test between two ranks.

    Args:
        input: the size of the input buffer.
        output: the size of the output buffer.  If it is "none", a collective writes its result to the input buffer.
        reduces: whether the collective applies a reduction.
        bus: the function that maps the number of ranks to the ratio of bus bandwidth to algorithm bandwidth.
        messages: whether the operation is a point-to-point test.
    """

    name: str
    input: Extent
    output: Extent = "none"
    reduces: bool = False
    bus: Callable[[int], float] = lambda n: 1.0
    messages: bool = False

    def unit(self, ranks: int, itemsize: int) -> int:
        """Return the unit in bytes; every message size must be a multiple of it."""
        return itemsize * (ranks if "part" in (self.input, self.output) or self.name == "all_to_all" else 1)

    def elements(self, extent: Extent, size: int, ranks: int, itemsize: int) -> int:
        """Return the number of elements in a buffer with extent `extent`, for a message size of `size` bytes."""
        if extent == "none":
            return 0
        return size // itemsize // (ranks if extent == "part" else 1)

    def bytes_per_rank(self, size: int, ranks: int) -> int:
        """Return the total size in bytes of a rank's input and output buffers, for the message size `size`."""
        each = {"whole": size, "part": -(-size // ranks), "none": 0}
        return each[self.input] + each[self.output]

    @property
    def sized(self) -> bool:
        """Return whether the operation has a message size; a barrier has none."""
        return self.input != "none"

    @property
    def is_bandwidth(self) -> bool:
        """Return whether the result is a bandwidth instead of a latency."""
        return self.name in ("bw", "bibw")


def _share(n: int) -> float:
    return (n - 1) / n


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", "whole", reduces=True, bus=lambda n: 2 * _share(n)),
        Operation("reduce_scatter", "whole", "part", reduces=True, bus=_share),
        Operation("all_gather", "part", "whole", bus=_share),
        Operation("broadcast", "whole"),
        Operation("reduce", "whole", reduces=True),
        Operation("all_to_all", "whole", "whole", bus=_share),
        Operation("gather", "part", "whole", bus=_share),
        Operation("scatter", "whole", "part", bus=_share),
        Operation("barrier", "none"),
        Operation("latency", "whole", "whole", messages=True),
        Operation("bw", "whole", "whole", messages=True),
        Operation("bibw", "whole", "whole", messages=True),
    )
}
