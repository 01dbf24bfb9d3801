"""The order in which recomputation is worth its operations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Option(NamedTuple):
    """One way to recompute a block: the bytes that it spares and the floating-point operations that it repeats."""

    spared: int
    flops: int


def cheapest_first(blocks: Mapping[str, Mapping[str, Option]]) -> Iterator[tuple[int, dict[str, str]]]:
    """Choices that spare more and more bytes: (bytes spared by all, way by block).

    `blocks` gives the options of each block, by way.  A choice differs from the one before it in one block, by the
    change that spares most bytes for each further operation: the greedy solution of a knapsack, where a
    block may be taken a little (one way) or whole (another).  Equals are taken in the order given: the first
    blocks keep their activations longest.
    """
    chosen: dict[str, str] = {}
    total = 0
    while True:
        best: tuple[tuple[float, int], str, str] | None = None
        for name, options in blocks.items():
            now = options[chosen[name]] if name in chosen else Option(0, 0)
            for way, option in options.items():
                spared, flops = option.spared - now.spared, option.flops - now.flops
                if spared <= 0:
                    continue
                worth = (spared / flops if flops > 0 else math.inf, spared)
                if best is None or worth > best[0]:
                    best = (worth, name, way)
        if best is None:
            return
        (_, more), name, way = best
        total += more
        chosen = {**chosen, name: way}
        yield total, dict(chosen)
