"""Which named requests are ready on all ranks of a process set: the protocol.

Ranks submit the same names in different orders and at different times: the hooks of a backward pass fire in the
order in which gradients happen to be ready.  Collectives must nevertheless be executed in one order.  The
ranks find it in *cycles*.  A cycle has one or two steps, each a collective on a control group that nothing else
uses:

1. Every rank contributes a row of bits, and the rows are combined with AND.  Bit s says "what the cache has in slot
   s I have been asked for, with the same signature as then"; one more bit says "I have nothing to announce".
2. If some rank has something to announce, every rank's announcement goes to every rank: names with
   signatures that are not in the cache, slots whose agreement no longer holds, that it has joined, that it shuts
   down.

From a cycle follows a list of what is executed now: first the slots whose bit is set in the result, by number, then
the names that, with these announcements, every rank has announced (or has joined), in the order in which the
announcements made them complete.  `fusion` packs that list, and the packs are executed in order.

*All ranks execute the same list in the same order.*  Call S the replicated state: the cache, the table of names
that were announced by some ranks, and who has joined.  It begins empty, so equal.  The result of step 1 is
equal on all ranks, as any all-reduce's is; so is the outcome of step 2, an all-gather.  The list, the new S and
the packing are functions of S and of these two results, with no look at anything local: not at time, not
at what this rank has pending.  By induction over cycles, all is equal in every cycle.  The only choices made
locally are *when* to begin a cycle and what to contribute to it.  (What a rank knows locally of a slot it derives
from S too: when an agreement leaves the cache while the rank has its bit set, the request goes back among those
to be announced.)

*What is executed was submitted.*  A bit comes out set only if every rank that has not joined set it, and a name
becomes complete only if every such rank announced it.  A rank does either only for a request that it holds, and
holds it until it is executed.  A rank that has joined contributes zeros and needs no request.

*Nothing waits for ever.*  Within a cycle a rank waits only for the other ranks' contributions to a collective of
the control group, or of the data group in executing the list, which is the same on all.  So a cycle ends
when every rank has begun it, and a rank begins one whenever it has something pending, and at the latest after
`HEARTBEAT_S`: its thread blocks nowhere else.  Each process set has its own groups and thread, so that no set waits
for another, in whatever order programs use them.  A request that all ranks make is therefore executed at most
two cycles after the last rank's submission: one in which it is announced or its bit set, one more if
its slot was given up meanwhile.  A request that some rank never makes is what `stall` reports, with names and
ranks, and its deadline ends.  If a process dies, the control group's collective raises on all others.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from farandole.horovod.engine.cache import ResponseCache
from farandole.horovod.engine.requests import (
    ALLREDUCE,
    BARRIER,
    JOIN,
    OP_NAMES,
    SUM,
    UNNAMED,
    Request,
    Signature,
    disagreement,
)

HEARTBEAT_S = 1.0
"""A rank with nothing to do takes part in a cycle this often, so that the others learn who is missing."""

_QUIET = 1
"""In the first byte of a row: this rank has nothing to announce."""
_INLINE = 2040
"""Bytes of an announcement that travel in the first collective of step 2; the rest of a longer one in another."""


@dataclass
class Ready:
    """One name that all ranks execute now; `request` is this rank's part, None if it has joined."""

    name: str
    signatures: Sequence[Signature | None]
    request: Request | None
    error: str | None = None

    @property
    def signature(self) -> Signature:
        """What the ranks agreed on (for kinds where lengths may differ: what the first of them asked for)."""
        return next(found for found in self.signatures if found is not None)


@dataclass
class Announcement:
    """What one rank tells all others in step 2."""

    requests: list[tuple[str, Signature]] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)
    joins: bool = False
    shutdown: str | None = None


@dataclass
class Outcome:
    """What follows from a cycle."""

    ready: list[Ready]
    last_joined: int | None = None
    shutdown: str | None = None


class Negotiator:
    """One rank's part in the cycles of one process set.

    group: the control group.  ranks: the members' numbers in the world.  `table` maps each name that is announced
    but not complete to its signatures by member, in the order of first announcement.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], capacity: int) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._ranks = ranks
        # replicated: the same on all ranks
        self.cache = ResponseCache(capacity)
        self.table: dict[str, dict[int, Signature]] = {}
        self.joined: list[int] = []
        # local: this rank's requests by how far they are
        self._unannounced: deque[Request] = deque()
        self._announced: dict[str, Request] = {}
        self._hits: dict[int, Request] = {}
        self._bits = 0
        self._given_up: list[int] = []
        self._joins: Request | None = None
        self._row = torch.zeros(8 * (1 + -(-capacity // 64)), dtype=torch.uint8)

    # ---- this rank's requests ----

    def take(self, requests: Iterable[Request]) -> None:
        """Accept requests that were submitted."""
        find, rank = self.cache.find, self._rank
        for request in requests:
            entry = find(request.name)
            if entry is not None and entry.signatures[rank] == request.signature:
                self._hits[entry.slot] = request
                self._bits |= 1 << entry.slot
                continue
            if entry is not None:
                self._given_up.append(entry.slot)
            self._unannounced.append(request)

    def pending(self) -> bool:
        """Whether any request waits for other ranks or to be announced."""
        return bool(self._hits or self._unannounced or self._announced)

    def drop_all(self) -> None:
        """Forget this rank's requests: the engine ends."""
        self._hits.clear()
        self._unannounced.clear()
        self._announced.clear()

    def give_up_old(self, before: float) -> None:
        """Announce in full what waits in the cache since `before`, so that the table shows who lacks it."""
        for slot in [slot for slot, request in self._hits.items() if request.submitted < before]:
            self._given_up.append(slot)
            self._announce_again(slot)

    # ---- a cycle ----

    def cycle(self, shutdown: str | None = None) -> Outcome:
        """Meet the other ranks; every member calls it the same number of times."""
        mine = self._announcement(shutdown)
        bits = self._bits
        if self._rank in self.joined:  # whatever the others have, this rank goes along with
            bits = self.cache.all_bits()
        agreed, quiet = self._combine(bits, quiet=mine is None)
        outcome = Outcome(self._take_hits(agreed))
        if not quiet:
            announcements = self._exchange(mine or Announcement())
            self._read(announcements, outcome)
        return outcome

    def _announcement(self, shutdown: str | None) -> Announcement | None:
        if not (self._unannounced or self._given_up or shutdown):
            return None
        mine = Announcement(given_up=self._given_up, shutdown=shutdown)
        self._given_up = []
        while self._unannounced:
            request = self._unannounced.popleft()
            if request.signature.kind == JOIN:
                self._joins, mine.joins = request, True
            mine.requests.append((request.name, request.signature))
            self._announced[request.name] = request
        return mine

    def _combine(self, bits: int, quiet: bool) -> tuple[int, bool]:
        """Step 1: the bits that all ranks have set, and whether nobody has anything to announce."""
        row = self._row
        data = row.numpy()
        data[0] = _QUIET if quiet else 0
        data[8:] = np.frombuffer(bits.to_bytes(len(data) - 8, "little"), np.uint8)
        dist.all_reduce(row.view(torch.int64), dist.ReduceOp.BAND, group=self._group)
        return int.from_bytes(data[8:].tobytes(), "little"), data[0] == _QUIET

    def _take_hits(self, agreed: int) -> list[Ready]:
        ready = []
        while agreed:
            lowest = agreed & -agreed
            agreed ^= lowest
            slot = lowest.bit_length() - 1
            entry = self.cache.at(slot)
            self.cache.use(entry)
            request = self._hits.pop(slot, None)
            self._bits &= ~lowest
            refusal = self._refusal_after_join(entry.name, entry.signatures[0])
            ready.append(Ready(entry.name, entry.signatures, request, refusal))
        return ready

    def _exchange(self, mine: Announcement) -> list[Announcement]:
        """Step 2: every rank's announcement."""
        payload = pickle.dumps(mine, protocol=pickle.HIGHEST_PROTOCOL)
        blocks = self._gather(len(payload).to_bytes(8, "little") + payload[:_INLINE], 8 + _INLINE)
        lengths = [int.from_bytes(block[:8], "little") for block in blocks]
        texts = [block[8 : 8 + length] for block, length in zip(blocks, lengths, strict=True)]
        longest = max(lengths)
        if longest > _INLINE:
            rests = self._gather(payload[_INLINE:], longest - _INLINE)
            texts = [
                text + rest[: max(0, length - _INLINE)]
                for text, rest, length in zip(texts, rests, lengths, strict=True)
            ]
        return [pickle.loads(text) for text in texts]

    def _gather(self, data: bytes, size: int) -> list[bytes]:
        """All-gather `size` bytes of each rank."""
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        everyone = torch.empty(self._size, size, dtype=torch.uint8)
        dist.all_gather(list(everyone.unbind()), mine, group=self._group)
        return [row.numpy().tobytes() for row in everyone]

    # ---- reading announcements: from here on nothing local decides ----

    def _read(self, announcements: Sequence[Announcement], outcome: Outcome) -> None:
        for announcement in announcements:
            for slot in announcement.given_up:
                self.cache.remove(slot)
                self._announce_again(slot)
        complete: dict[str, None] = {}  # in order
        for member, announcement in enumerate(announcements):
            for name, signature in announcement.requests:
                if signature.kind == JOIN:
                    continue
                by_member = self.table.setdefault(name, {})
                by_member[member] = signature
                if self._is_complete(by_member):
                    complete[name] = None
            if announcement.joins:
                self.joined.append(member)
                complete |= {n: None for n, found in self.table.items() if self._is_complete(found)}
        for name in complete:
            outcome.ready.append(self._complete(name))
        if len(self.joined) == self._size:
            outcome.last_joined = self._ranks[self.joined[-1]]
            self.joined = []
            if self._joins is not None:
                request, self._joins = self._joins, None
                del self._announced[request.name]
                outcome.ready.append(Ready(request.name, [request.signature], request))
        reasons = [announcement.shutdown for announcement in announcements if announcement.shutdown]
        outcome.shutdown = reasons[0] if reasons else None

    def _is_complete(self, by_member: dict[int, Signature]) -> bool:
        return len(by_member) == self._size or all(
            member in by_member or member in self.joined for member in range(self._size)
        )

    def _complete(self, name: str) -> Ready:
        by_member = self.table.pop(name)
        signatures = [by_member.get(member) for member in range(self._size)]
        everyone = [found for found in signatures if found is not None]
        error = disagreement(name, signatures, self._ranks) or self._refusal_after_join(name, everyone[0])
        if error is None and len(everyone) == self._size and UNNAMED not in name:
            gone = self.cache.add(name, everyone)
            if gone is not None:
                self._announce_again(gone)
        return Ready(name, signatures, self._announced.pop(name, None), error)

    def _refusal_after_join(self, name: str, signature: Signature) -> str | None:
        """Zeros stand for the tensors of ranks that have joined; that is right for sums only."""
        if not self.joined:
            return None
        joined = ", ".join(str(self._ranks[member]) for member in self.joined)
        if signature.kind == BARRIER or (signature.kind == ALLREDUCE and signature.op <= SUM):
            return None
        what = signature.kind
        if signature.kind == ALLREDUCE:
            what = f"{signature.kind} with op={OP_NAMES[signature.op]}"
        return (
            f"{what} of tensor {name} is not supported once a rank has joined (rank {joined}); "
            f"allreduce with op=Sum or op=Average is, and hvd.barrier()"
        )

    def _announce_again(self, slot: int) -> None:
        """A slot was given up: a request that was this rank's bit in it is announced by its name."""
        request = self._hits.pop(slot, None)
        self._bits &= ~(1 << slot)
        if request is not None:
            self._unannounced.append(request)
