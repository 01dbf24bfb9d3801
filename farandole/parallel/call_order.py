"""One order of collective calls on all ranks, where each rank knows only what it computes itself.

Blocks gather their weights when they compute, and their gradients are reduced when they are complete.  If every rank made these calls
when it needs them, ranks that compute different blocks (a layer that is skipped, an early exit, a rank without samples) would wait for
each other forever, or combine different tensors of equal size.  So ranks make the calls, numbered as *items*, in an agreed order:

    order.begin("backward")
    order.request(3)         # returns when item 3 has been launched
    order.advance(ready)     # launches the next items, as far as they are ready
    order.end(rest)          # launches what other ranks need, and what they have left

- The first pass of a kind is *negotiated*: before each launch all ranks take the minimum of the items they want.  A rank that wants
  another item takes part, and asks again; a rank that has ended its pass wants nothing.  When no rank wants anything, the pass ends.
- Later passes follow the order of the negotiated one, without asking.  A rank that requests an item launches all items before it, also
  a reduction of which it has no or only some gradients.  Reductions are sums: gradients that come later are reduced at the end of the
  pass, and added.
- A rank that wants an item that does not come any more launches the rest of the order, and negotiates.  All ranks negotiate after the
  last item, if only to say that they want nothing: one small reduction per pass.  The next pass is then negotiated as a whole.

Why all ranks make the same calls: the calls of a rank are the agreed order, whole, followed by rounds of negotiation.  In a round all
ranks compute the same minimum; it is launched, or ends the pass, on all of them.

Why no rank waits forever: calls are asynchronous, and a rank waits only for calls that it has launched itself.  Take the first item, or
round, that is not complete, and a rank that has not launched it.  This rank does not wait, as all that it has launched is complete;
so it computes, and launches the item when it requests a later one or ends its pass.  Each round launches an item that a rank wants, and
a rank wants finitely many in a pass.
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
    """Launches items in one order on all ranks of `comm`.

    Args:
        launch: makes the collective call of an item, and does not wait for it.
        gathers: items below this number gather what is computed with; the others reduce results.
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
        """The kind of the pass under way."""
        return self._kind

    def begin(self, kind: Kind) -> None:
        """Begin a pass; one that failed is forgotten."""
        self._kind = kind
        self._sequence = self._agreed[kind]
        self._position = 0
        self._negotiated = []

    def request(self, item: int) -> None:
        """Launch `item`, and what comes before it."""
        if item in self._sequence[self._position :]:
            while self._next() != item:
                self._launch_next()
            self._launch_next()
        else:
            self._launch_rest()
            self._negotiate(item)

    def advance(self, ready: Callable[[int], bool]) -> None:
        """Launch the next items, as far as they are ready."""
        while (item := self._next()) is not None and ready(item):
            self._launch_next()

    def next_gathers(self, count: int) -> list[int]:
        """Return the gathers that come next, as far as they are agreed."""
        left = islice(self._sequence, self._position, None)
        return list(islice((item for item in left if item < self._gathers), count))

    @property
    def negotiates(self) -> bool:
        """Whether there is no order yet, so that each call must be requested."""
        return not self._sequence

    def end(self, rest: Callable[[], Iterable[int]] = lambda: ()) -> None:
        """End the pass: launch what is left of the order, and `rest()`, what is then left on this rank."""
        if self._kind is None:
            return
        self._launch_rest()
        for item in rest():
            self._negotiate(item)
        self._negotiate(_NOTHING)
        if not self._sequence:
            self._agreed[self._kind] = self._gathering_ahead(self._negotiated)
        elif self._negotiated:
            self._agreed[self._kind] = []  # ranks need other items than before
        self._kind = None

    def abandon(self) -> None:
        """Forget a pass that has failed."""
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
        """Launch what ranks want until `wanted` is launched, or until no rank wants anything."""
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
        """Return the items in an order in which each gather precedes the reductions of gradients computed meanwhile."""
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
