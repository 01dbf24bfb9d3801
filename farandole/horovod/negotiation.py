"""Decide which named requests are ready on all ranks of a process set: the protocol.

Ranks submit the same names in different orders and at different times, because the hooks of a backward pass run in the
order in which gradients become ready.  Collectives must be executed in one order.  The ranks agree on the order in
*cycles*.  A cycle has one or two steps.  Each step is a collective on a control group that is used for nothing else:

1. Every rank contributes a row of bits, and the rows are combined with AND.  Bit s means "the request in slot s of
   the cache was submitted here, with the cached signature"; one more bit means "I have nothing to announce".
2. If some rank has something to announce, every rank's announcement is sent to every rank: names with signatures
   that are not in the cache, slots whose agreement is void, that the rank has joined, that it shuts down.

A cycle yields the list of requests to execute: first the slots whose bit is set in the result, by number, then the
names that every rank has announced (or has joined), in the order in which the announcements completed them.
`execution` fuses the list into packs and executes the packs in order.

*All ranks execute the same list in the same order.*  Let S be the replicated state: the cache, the table of names that
some ranks have announced, and the ranks that have joined.  S is empty at first, so S is equal on all ranks.  The result
of step 1 is equal on all ranks, because it is the result of an all-reduce; so is the result of step 2, an all-gather.
The list, the new S and the packs are functions of S and of these two results.  They depend on nothing local, neither on
time nor on this rank's pending requests.  By induction over cycles, S and the list are equal in every cycle.  A rank
decides alone only *when* to begin a cycle and what to contribute.  (The local view of a slot follows from S too: when
an agreement leaves the cache while the rank has its bit set, the request is announced again.)

*Only submitted requests are executed.*  A bit is set in the result only if every rank that has not joined has set it,
and a name is complete only if every such rank has announced it.  A rank sets a bit or announces a name only for a
request that it holds, and holds the request until it is executed.  A rank that has joined contributes zeros and needs
no request.

*No request waits for ever.*  Within a cycle a rank waits only for the other ranks' contributions to a collective of the
control group, or of the data group while it executes the list, which is the same on all ranks.  So a cycle ends when
every rank has begun it.  A rank begins a cycle when it has pending requests, and at the latest after `HEARTBEAT_S`; its
thread blocks nowhere else.  Each process set has its own groups and thread, so that no set waits for another set.  A
request that all ranks make is therefore executed at most two cycles after the last rank's submission: one cycle in
which it is announced or its bit is set, and one more if its slot was given up meanwhile.  `monitoring` reports a
request that some rank never makes, with names and ranks, and its deadline ends the run.  If a process dies, the
collective of the control group raises on all other ranks.

*The response cache* holds requests on which all ranks have agreed; each has a small number, its slot.  A training loop
repeats names with the same signatures in every step.  A cached name costs one bit per cycle.
"""

from __future__ import annotations

import heapq
import pickle
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from farandole.horovod.requests import (
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


@dataclass(frozen=True)
class Entry:
    """An agreement: a name, and the signature of each rank of the process set."""

    slot: int
    name: str
    signatures: tuple[Signature, ...]


class ResponseCache:
    """At most `capacity` agreements.  A full cache discards the least recently executed agreement.

    The cache depends only on the calls of `add`, `use` and `remove`.  Ranks that make these calls in the same
    order have the same cache.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._by_name: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self._by_slot: dict[int, Entry] = {}
        self._free = list(range(capacity))

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> Entry | None:
        """Return the agreement on a name, or None."""
        return self._by_name.get(name)

    def at(self, slot: int) -> Entry:
        """Return the agreement in a slot."""
        return self._by_slot[slot]

    def use(self, entry: Entry) -> None:
        """Mark an agreement as the most recently executed."""
        self._by_name.move_to_end(entry.name)

    def add(self, name: str, signatures: Sequence[Signature]) -> int | None:
        """Store an agreement; return the slot of the discarded agreement, or None."""
        if not self.capacity:
            return None
        gone = None
        if name in self._by_name:
            gone = self._by_name[name].slot
        elif not self._free:
            gone = next(iter(self._by_name.values())).slot
        if gone is not None:
            self.remove(gone)
        entry = Entry(heapq.heappop(self._free), name, tuple(signatures))
        self._by_name[name] = entry
        self._by_slot[entry.slot] = entry
        return gone

    def remove(self, slot: int) -> None:
        """Discard the agreement in a slot, if there is one."""
        entry = self._by_slot.pop(slot, None)
        if entry is not None:
            del self._by_name[entry.name]
            heapq.heappush(self._free, slot)

    def all_bits(self) -> int:
        """Return a number in which the bits of all used slots are set."""
        return sum(1 << slot for slot in self._by_slot)


HEARTBEAT_S = 1.0
"""A rank with nothing to do takes part in a cycle this often, so that the others learn who is missing."""

_QUIET = 1
"""In the first byte of a row: this rank has nothing to announce."""
_INLINE = 2040
"""Bytes of an announcement that travel in the first collective of step 2; the rest of a longer one in another."""


@dataclass
class Ready:
    """One name that all ranks execute; `request` is this rank's request, None if it has joined."""

    name: str
    signatures: Sequence[Signature | None]
    request: Request | None
    error: str | None = None

    @property
    def signature(self) -> Signature:
        """The signature of the first rank that has not joined; lengths of other ranks may differ for some kinds."""
        return next(found for found in self.signatures if found is not None)


@dataclass
class Announcement:
    """The message of one rank to all ranks in step 2."""

    requests: list[tuple[str, Signature]] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)
    joins: bool = False
    shutdown: str | None = None


@dataclass
class Outcome:
    """The result of a cycle."""

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
        """Accept submitted requests."""
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
        """Return whether any request waits for other ranks or for its announcement."""
        return bool(self._hits or self._unannounced or self._announced)

    def drop_all(self) -> None:
        """Discard this rank's requests."""
        self._hits.clear()
        self._unannounced.clear()
        self._announced.clear()

    def give_up_old(self, before: float) -> None:
        """Announce cached requests that have waited since `before` by name, so that the table shows missing ranks."""
        for slot in [slot for slot, request in self._hits.items() if request.submitted < before]:
            self._given_up.append(slot)
            self._announce_again(slot)

    # ---- a cycle ----

    def cycle(self, shutdown: str | None = None) -> Outcome:
        """Run one cycle; every member calls it the same number of times."""
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
        """Run step 1: return the bits that all ranks have set, and whether no rank has an announcement."""
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
        """Run step 2: return every rank's announcement."""
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
        """Return why a request cannot be executed after a join: zeros of joined ranks are correct for sums only."""
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
        """Announce the request of a slot by name, because the agreement was discarded."""
        request = self._hits.pop(slot, None)
        self._bits &= ~(1 << slot)
        if request is not None:
            self._unannounced.append(request)
