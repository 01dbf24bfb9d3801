"""Make all ranks issue their collective calls in the same order, although ranks may compute different blocks.

A block's weights are gathered when the block computes, and its gradients are reduced when they are complete.  If every
rank made these calls on demand, ranks that compute different blocks (a skipped layer, an early exit, a rank without
samples) would deadlock, or combine different tensors of equal size.  Therefore each call is an *item* with a number,
and all ranks launch the items in an agreed order:

    order.begin("backward")
    order.request(3)         # returns when item 3 has been launched
    order.advance(ready)     # launches the next items that are ready
    order.end(rest)          # launches the remaining items of this rank and of other ranks

- The first pass of a kind is *negotiated*: before each launch, an all-reduce computes the minimum of the items that
  ranks request.  A rank that requested a different item joins the launch and requests its item again.  A rank that
  has ended its pass requests nothing.  When no rank requests an item, the pass ends.
- Later passes follow the order of the negotiated pass.  When a rank requests an item, it first launches all earlier
  items, including reductions for which it has only some gradients or none.  Reductions are sums, so late gradients can
  be reduced at the end of the pass and added to the result.
- A rank that requests an item outside the remaining order launches the rest of the order, and then negotiates.  All
  ranks negotiate after the last item, usually only to confirm that no rank requests an item.  This costs one small
  reduction per pass.  If a rank does request an item, the entire next pass of this kind is negotiated.

*All ranks make the same calls.*  Each rank's calls are the full agreed order, followed by negotiation rounds.  In each
round, all ranks compute the same minimum, and all ranks launch the item with this number or end the pass.

*No rank waits forever.*  Calls are asynchronous, and a rank waits only for calls that it has launched.  Consider the
first item or round that is not complete, and a rank that has not launched it.  All calls that this rank has launched
are complete, so the rank does not wait.  It computes, and launches the item when it requests this or a later item, or
ends its pass.  Each round launches an item that a rank requests.  A rank requests finitely many items in a pass, so
every pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Literal

import torch

from farandole.comm.communicator import Communicator

Kind = Literal["forward", "backward"]

_NOTHING = 1 << 30


class CallOrder:
    """Launches items in the same order on all ranks of `comm`.

    Args:
        launch: a function that launches the collective call of an item without waiting for it.
        gathers: items below this number are gathers of weights; the others are reductions of gradients.
    """

    def __init__(self, comm: Communicator, launch: Callable[[int], None], gathers: int) -> None:
        self._comm, self._launch, self._gathers = comm, launch, gathers
        self._agreed: dict[Kind, list[int]] = {"forward": [], "backward": []}
        self._kind: Kind | None = None
        self._sequence: list[int] = []
        self._position = 0
        self._negotiated: list[int] = []

    @property
    def kind(self) -> Kind | None:
        """The kind of the current pass."""
        return self._kind

    def begin(self, kind: Kind) -> None:
        """Begin a pass, and discard a previous pass that failed."""
        self._kind = kind
        self._sequence = self._agreed[kind]
        self._position = 0
        self._negotiated = []

    def request(self, item: int) -> None:
        """Launch `item` and all items before it in the order; negotiate if `item` is not in the remaining order."""
        if item in self._sequence[self._position :]:
            while self._next() != item:
                self._launch_next()
            self._launch_next()
        else:
            self._launch_rest()
            self._negotiate(item)

    def advance(self, ready: Callable[[int], bool]) -> None:
        """Launch the next items that are ready, in order."""
        while (item := self._next()) is not None and ready(item):
            self._launch_next()

    def next_gathers(self, count: int) -> list[int]:
        """Return the next `count` gathers in the agreed order."""
        left = islice(self._sequence, self._position, None)
        return list(islice((item for item in left if item < self._gathers), count))

    @property
    def negotiates(self) -> bool:
        """Whether the current pass has no agreed order and is therefore negotiated."""
        return not self._sequence

    def end(self, rest: Callable[[], Iterable[int]] = lambda: ()) -> None:
        """End the pass: launch the remaining items of the agreed order, then the items that `rest()` returns."""
        if self._kind is None:
            return
        self._launch_rest()
        for item in rest():
            self._negotiate(item)
        self._negotiate(_NOTHING)
        if not self._sequence:
            self._agreed[self._kind] = self._gathering_ahead(self._negotiated)
        elif self._negotiated:
            self._agreed[self._kind] = []  # ranks need items outside of the order
        self._kind = None

    def forget(self, kind: Kind) -> None:
        """Discard the order of `kind`, so that the next pass of this kind is negotiated.

        All ranks must call this method between passes.
        """
        self._agreed[kind] = []

    def abandon(self) -> None:
        """Discard a failed pass."""
        self._kind = None

    def _next(self) -> int | None:
        return self._sequence[self._position] if self._position < len(self._sequence) else None

    def _launch_next(self) -> None:
        item = self._sequence[self._position]
        self._position += 1
        self._launch(item)

    def _launch_rest(self) -> None:
        while self._next() is not None:
            self._launch_next()

    def _negotiate(self, wanted: int) -> None:
        """Launch requested items until `wanted` is launched, or until no rank requests an item."""
        while True:
            smallest = torch.tensor(wanted, dtype=torch.int32)
            self._comm.all_reduce(smallest, "min")
            item = int(smallest)
            if item != _NOTHING:
                self._negotiated.append(item)
                self._launch(item)
            if item == wanted:
                return

    def _gathering_ahead(self, items: list[int]) -> list[int]:
        """Return `items`, with each gather moved before the reductions that directly precede it."""
        ordered: list[int] = []
        reductions = 0  # since the last gather
        for item in items:
            if item < self._gathers:
                ordered.insert(len(ordered) - reductions, item)
                reductions = 0
            else:
                ordered.append(item)
                reductions += 1
        return ordered
