"""The negotiation protocol: find the named requests that all ranks of a process set have submitted.

Ranks submit the same names in different orders and at different times, because backward hooks run in the order in which
gradients become ready.  Collectives must run in the same order on all ranks, so the ranks negotiate the order in
*cycles*.  A cycle has one or two steps.  Each step is a collective on a dedicated control group:

1. Every rank contributes a row of bits, and an all-reduce combines the rows with AND.  Bit s is set if the rank has
   submitted the request in cache slot s with the cached signature.  An extra bit is set if the rank has nothing to
   announce.
2. If any rank has something to announce, an all-gather sends every rank's announcement to every rank.  An announcement
   lists the names and signatures that are not in the cache, and the slots whose entries are invalid.  It also states
   whether the rank has joined and whether the rank is shutting down.

A cycle returns the list of requests to execute.  The list starts with the cached requests whose bits are set in the
result of step 1, sorted by slot number.  Then come the requests that every rank (except joined ranks) has announced by name, in
the order in which the announcements became complete.  `execution` fuses the list into packs and executes the packs in
order.

*All ranks execute the same list in the same order.*  Let S be the replicated state: the cache, the table of announced
names, and the set of joined ranks.  S is initially empty on all ranks.  The result of step 1 is equal on all ranks,
because it is the result of an all-reduce.  The result of step 2 is equal on all ranks, because it is the result of an
all-gather.  The list, the new S and the packs depend only on S and these two results, and not on local state such as
the time or this rank's pending requests.  By induction over cycles, S and the list are equal on all ranks in every
cycle.  Only the start time of a cycle and a rank's contribution are local decisions.  (If an entry leaves the cache
after a rank has set the entry's bit, the rank announces the request again.)

*Only submitted requests are executed.*  A bit is set in the result only if every rank that has not joined has set the
bit.  A name is complete only if every rank that has not joined has announced it.  A rank that has not joined sets a
bit or announces a name only for a submitted request, and keeps the request until execution.  A joined rank sets the
bits of all used slots, contributes zeros to the collectives, and needs no request.

*No request waits forever.*  Within a cycle, a rank waits only for other ranks' contributions to collectives, on the
control group and (for the agreed list) on the data group.  A cycle therefore ends once every rank has begun it.  A rank
begins a cycle when it has pending requests, and at the latest after `HEARTBEAT_S`.  The engine thread does not block
elsewhere.  Each process set has its own groups and thread, so no set waits for another set.  A request that all ranks
submit is therefore executed at most two cycles after the last submission: one cycle to announce the request or set its
bit, and a second cycle if its slot was invalidated in the meantime.  If some rank never submits a request, `monitoring`
reports the request names and the missing ranks, and ends the run after a time limit.  If a process dies, the control
group's collective raises an exception on all other ranks.

*The response cache* holds the requests on which all ranks have agreed.  Each entry occupies a numbered slot.  A
training loop repeats the same names and signatures in every step, and a cached name costs one bit per cycle.
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
    """A cache entry: the name of a request on which all ranks have agreed, and each rank's signature."""

    slot: int
    name: str
    signatures: tuple[Signature, ...]


class ResponseCache:
    """An LRU cache for at most `capacity` requests.

    The contents depend only on the calls to `add`, `use` and `remove`.  Ranks that make the same calls in the same
    order have equal caches.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._by_name: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self._by_slot: dict[int, Entry] = {}
        self._free = list(range(capacity))

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> Entry | None:
        """Return the cache entry for a name, or None."""
        return self._by_name.get(name)

    def at(self, slot: int) -> Entry:
        """Return the cache entry in a slot."""
        return self._by_slot[slot]

    def use(self, entry: Entry) -> None:
        """Mark a cache entry as most recently used."""
        self._by_name.move_to_end(entry.name)

    def add(self, name: str, signatures: Sequence[Signature]) -> int | None:
        """Add a cache entry, and return the slot of the replaced or evicted entry, or None.

        If the name is already cached, its entry is replaced.  If the cache is full, the least recently used entry
        is evicted.
        """
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
        """Discard the cache entry in a slot, if any."""
        entry = self._by_slot.pop(slot, None)
        if entry is not None:
            del self._by_name[entry.name]
            heapq.heappush(self._free, slot)

    def all_bits(self) -> int:
        """Return an integer in which the bits of all used slots are set."""
        return sum(1 << slot for slot in self._by_slot)


HEARTBEAT_S = 1.0
"""The interval between cycles on an idle rank, in seconds.

These cycles tell the other ranks which requests are missing.
"""

_QUIET = 1
"""The first byte of the row from a rank that has nothing to announce."""
_INLINE_BYTES = 2040
"""The maximum number of announcement bytes in the first all-gather of step 2.

A second all-gather sends the remaining bytes of longer announcements.
"""


@dataclass
class Ready:
    """A request that all ranks execute.  `request` is this rank's request, or None if this rank has joined."""

    name: str
    signatures: Sequence[Signature | None]
    request: Request | None
    error: str | None = None

    @property
    def signature(self) -> Signature:
        """Return the signature of the first rank that has not joined.

        If `error` is None, all signatures are equal, except for the number of rows in all-gathers and all-to-alls.
        """
        return next(found for found in self.signatures if found is not None)


@dataclass
class Announcement:
    """The message that a rank sends to all ranks in step 2 of a cycle."""

    requests: list[tuple[str, Signature]] = field(default_factory=list)
    invalidated: list[int] = field(default_factory=list)
    joins: bool = False
    shutdown: str | None = None


@dataclass
class Outcome:
    """The result of a cycle.

    Args:
        ready: The requests to execute, in order.
        last_joined: The rank that joined last, if all ranks have now joined, else None.
        shutdown: The reason to shut down, or None.
    """

    ready: list[Ready]
    last_joined: int | None = None
    shutdown: str | None = None


class Negotiator:
    """Runs negotiation cycles for one process set on this rank.

    The attribute `table` contains the names that some but not all members have announced, in the order of their
    first announcement.  It maps each name to a dict that maps members to signatures.

    Args:
        group: The control group.
        ranks: The members' ranks in the world.
        capacity: The capacity of the response cache, in names.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], capacity: int) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._ranks = ranks
        # replicated state, equal on all ranks
        self.cache = ResponseCache(capacity)
        self.table: dict[str, dict[int, Signature]] = {}
        self.joined: list[int] = []
        # local state: this rank's requests, by progress
        self._unannounced: deque[Request] = deque()
        self._announced: dict[str, Request] = {}
        self._hits: dict[int, Request] = {}
        self._bits = 0
        self._invalidated: list[int] = []
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
                self._invalidated.append(entry.slot)
            self._unannounced.append(request)

    def pending(self) -> bool:
        """Return whether any of this rank's requests is unannounced or waiting for other ranks."""
        return bool(self._hits or self._unannounced or self._announced)

    def drop_all(self) -> None:
        """Discard this rank's pending requests."""
        self._hits.clear()
        self._unannounced.clear()
        self._announced.clear()

    def invalidate_older_than(self, before: float) -> None:
        """Invalidate the cache entries of pending requests that this rank submitted earlier than `before`.

        The requests are then announced by name.  `before` is a `time.monotonic` time.  Afterwards, `table` shows which
        ranks have not submitted these requests.
        """
        for slot in [slot for slot, request in self._hits.items() if request.submitted < before]:
            self._invalidated.append(slot)
            self._announce_again(slot)

    # ---- a cycle ----

    def cycle(self, shutdown: str | None = None) -> Outcome:
        """Run one cycle; all members must call this method.

        `shutdown` is this rank's reason to shut down, or None.
        """
        own = self._announcement(shutdown)
        bits = self._bits
        if self._rank in self.joined:  # a joined rank agrees to every request
            bits = self.cache.all_bits()
        agreed, quiet = self._combine(bits, quiet=own is None)
        outcome = Outcome(self._take_hits(agreed))
        if not quiet:
            announcements = self._exchange(own or Announcement())
            self._read(announcements, outcome)
        return outcome

    def _announcement(self, shutdown: str | None) -> Announcement | None:
        if not (self._unannounced or self._invalidated or shutdown):
            return None
        own = Announcement(invalidated=self._invalidated, shutdown=shutdown)
        self._invalidated = []
        while self._unannounced:
            request = self._unannounced.popleft()
            if request.signature.kind == JOIN:
                self._joins, own.joins = request, True
            own.requests.append((request.name, request.signature))
            self._announced[request.name] = request
        return own

    def _combine(self, bits: int, quiet: bool) -> tuple[int, bool]:
        """Run step 1; return the bits that all ranks have set, and whether no rank has an announcement."""
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

    def _exchange(self, own: Announcement) -> list[Announcement]:
        """Run step 2; return the announcements of all ranks."""
        payload = pickle.dumps(own, protocol=pickle.HIGHEST_PROTOCOL)
        blocks = self._gather(len(payload).to_bytes(8, "little") + payload[:_INLINE_BYTES], 8 + _INLINE_BYTES)
        lengths = [int.from_bytes(block[:8], "little") for block in blocks]
        texts = [block[8 : 8 + length] for block, length in zip(blocks, lengths, strict=True)]
        longest = max(lengths)
        if longest > _INLINE_BYTES:
            rests = self._gather(payload[_INLINE_BYTES:], longest - _INLINE_BYTES)
            texts = [
                text + rest[: max(0, length - _INLINE_BYTES)]
                for text, rest, length in zip(texts, rests, lengths, strict=True)
            ]
        return [pickle.loads(text) for text in texts]

    def _gather(self, data: bytes, size: int) -> list[bytes]:
        """All-gather `data`, padded with zeros to `size` bytes, and return each rank's bytes."""
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        gathered = torch.empty(self._size, size, dtype=torch.uint8)
        dist.all_gather(list(gathered.unbind()), own, group=self._group)
        return [row.numpy().tobytes() for row in gathered]

    # ---- processing announcements: the results depend on replicated state only ----

    def _read(self, announcements: Sequence[Announcement], outcome: Outcome) -> None:
        for announcement in announcements:
            for slot in announcement.invalidated:
                self.cache.remove(slot)
                self._announce_again(slot)
        complete: dict[str, None] = {}  # ordered
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
        present = [found for found in signatures if found is not None]
        error = disagreement(name, signatures, self._ranks) or self._refusal_after_join(name, present[0])
        if error is None and len(present) == self._size and UNNAMED not in name:
            gone = self.cache.add(name, present)
            if gone is not None:
                self._announce_again(gone)
        return Ready(name, signatures, self._announced.pop(name, None), error)

    def _refusal_after_join(self, name: str, signature: Signature) -> str | None:
        """Return an error message if a request is not supported after a join, otherwise None."""
        if not self.joined:
            return None
        joined = ", ".join(str(self._ranks[member]) for member in self.joined)
        # joined ranks contribute zeros, which are correct for Sum and Average only
        if signature.kind == BARRIER or (signature.kind == ALLREDUCE and signature.op <= SUM):
            return None
        operation = signature.kind
        if signature.kind == ALLREDUCE:
            operation = f"{signature.kind} with op={OP_NAMES[signature.op]}"
        return (
            f"{operation} of tensor {name} is not supported once a rank has joined (rank {joined}); "
            f"use allreduce with op=Sum or op=Average, or hvd.barrier()"
        )

    def _announce_again(self, slot: int) -> None:
        """Queue this rank's request for a discarded cache entry, so that the request is announced by name."""
        request = self._hits.pop(slot, None)
        self._bits &= ~(1 << slot)
        if request is not None:
            self._unannounced.append(request)
