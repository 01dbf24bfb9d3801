"""Store the keys and values of running sequences, in contiguous slots or in pages.

Both stores keep, for each attention layer, two tensors of *blocks*:

    keys    (blocks, key-value heads, positions / 16, width, 16)     transposed in tiles of 16 positions
    values  (blocks, key-value heads, positions, value width)

The tensors belong to the store's `Memory`; the store itself records only which blocks are in use.

In `SlotStore`, each sequence has one block.  All blocks have the same length, which suffices for the longest sequence.
In `PageStore`, a block is a page of 16 positions, a sequence has a list of pages, and sequences with the same first
tokens share pages.  Attention reads the blocks of both stores in the same way (`rows.ragged_attention`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

TILE = 16
"""The number of positions per tile of keys, and per page."""
CHUNK = 256
"""The length of a slot is a multiple of this number of positions."""


def fitting_positions(free: int, context: int, sequences: int, per_position: int) -> int:
    """Return the default size of a KV cache, in positions.

    The cache fits `sequences` sequences of `context` tokens, but uses at most half of the `free` bytes.

    Args:
        per_position: the number of bytes per position.
    """
    return min(sequences * _round_up(context, CHUNK), free // 2 // per_position)


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer's keys and values at one position."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the number of bytes per position."""
        return self.heads * (self.key_width + self.value_width) * self.dtype.itemsize


@dataclass(eq=False)
class Blocks:
    """The blocks of a sequence in a store.

    Args:
        most: the maximum number of positions of the sequence.
        numbers: the indices of the blocks, in the order of the positions.
        stored: the number of positions whose keys and values are stored.
        digests: for each complete page, the hash of all tokens up to the end of the page.
        model: the name of the model that computes the keys and values.
    """

    most: int
    numbers: list[int] = field(default_factory=list)
    stored: int = 0
    digests: list[bytes] = field(default_factory=list)
    model: str = ""


class Memory:
    """The tensors of a store.

    Args:
        shapes: the sizes of each layer's keys and values.
    """

    def __init__(self, shapes: Sequence[LayerShape]) -> None:
        self._shapes = list(shapes)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.resize(0, 0, 0, 0)

    def resize(self, blocks: int, length: int, kept: int, stored: int) -> None:
        """Allocate `blocks` blocks of `length` positions, and copy stored positions from the old blocks.

        The first `stored` positions of each of the first `kept` old blocks are copied.
        """
        old = self.keys, self.values
        self.keys = [
            torch.zeros(blocks, each.heads, length // TILE, each.key_width, TILE, dtype=each.dtype)
            for each in self._shapes
        ]
        self.values = [
            torch.zeros(blocks, each.heads, length, each.value_width, dtype=each.dtype)
            for each in self._shapes
        ]
        if kept and stored:
            for before, after in zip(old[0], self.keys, strict=True):
                after[:kept, :, : stored // TILE] = before[:kept, :, : stored // TILE]
            for before, after in zip(old[1], self.values, strict=True):
                after[:kept, :, :stored] = before[:kept, :, :stored]

    def move(self, source: int, target: int, stored: int) -> None:
        """Copy the first `stored` positions of block `source` to block `target`."""
        tiles = -(-stored // TILE)
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, :, :tiles] = keys[source, :, :tiles]
            values[target, :, :stored] = values[source, :, :stored]


class Store(Protocol):
    """Stores the keys and values of running sequences."""

    memory: Memory
    unit: int
    """The capacity is a multiple of this number of positions."""
    block_length: int
    """The number of positions per block."""
    moves: int
    """The number of sequences that were moved into free slots."""

    @property
    def capacity(self) -> int:
        """Return the number of positions that fit in memory."""
        ...

    @property
    def used(self) -> int:
        """Return the number of positions that running sequences occupy."""
        ...

    @property
    def blocks(self) -> int:
        """Return the number of allocated blocks."""
        ...

    @property
    def cached(self) -> list[int]:
        """Return the indices of the unused blocks whose content can be shared."""
        ...

    def add(self, tokens: Sequence[int], most: int, *, share: bool = True, model: str = "") -> Blocks | None:
        """Add a sequence of at most `most` positions, and return its blocks, or None if too little memory is free.

        If an earlier sequence of model `model` started with the same tokens, the keys and values of the first
        positions may already be stored.  The keys and values of the last token are never shared.
        """
        ...

    def reserve(self, blocks: Blocks, length: int) -> None:
        """Allocate memory for the first `length` positions of a sequence.

        `length` must not exceed `blocks.most`.
        """
        ...

    def commit(self, blocks: Blocks, tokens: Sequence[int], stored: int) -> None:
        """Record that the keys and values of the first `stored` tokens in `tokens` are stored."""
        ...

    def release(self, blocks: Blocks) -> None:
        """Remove a sequence, and free its blocks."""
        ...

    def compact(self) -> None:
        """Move sequences into the blocks of removed sequences, if necessary."""
        ...

    def check(self) -> None:
        """Raise RuntimeError if the records of the store are inconsistent."""
        ...


class SlotStore:
    """A store with one contiguous slot per sequence.

    `compact` moves sequences from the last slots into free slots, so that running sequences occupy the first slots.
    All slots grow to a multiple of `CHUNK` positions when the longest sequence needs more positions.  The memory is
    freed when no sequence is running.

    Args:
        memory: the tensors.
        positions: the number of positions that fit in memory; the capacity is rounded down to a multiple of `CHUNK`.
    """

    unit = CHUNK

    def __init__(self, memory: Memory, positions: int) -> None:
        self.memory, self.capacity = memory, positions // CHUNK * CHUNK
        self._sequences: list[Blocks | None] = []
        self.block_length, self._slots, self.moves = 0, 0, 0

    @property
    def used(self) -> int:
        """Return the number of positions that running sequences occupy."""
        return sum(each.stored for each in self._sequences if each is not None)

    @property
    def blocks(self) -> int:
        """Return the number of allocated slots."""
        return self._slots

    @property
    def cached(self) -> list[int]:
        """Return an empty list, because slots are not shared."""
        return []

    def add(self, tokens: Sequence[int], most: int, *, share: bool = True, model: str = "") -> Blocks | None:
        """Add a sequence in the first free slot; see `Store.add`."""
        running = [each for each in self._sequences if each is not None]
        longest = max([most, *(each.most for each in running)])
        if (len(running) + 1) * _round_up(longest, CHUNK) > self.capacity:
            return None
        blocks = Blocks(most)
        hole = self._sequences.index(None) if None in self._sequences else len(self._sequences)
        self._sequences[hole : hole + 1] = [blocks]
        blocks.numbers = [hole]
        self._grow(max(hole + 1, self._slots), self.block_length)
        return blocks

    def reserve(self, blocks: Blocks, length: int) -> None:
        """Allocate memory for the first `length` positions of a sequence."""
        if length > self.block_length:
            self._grow(self._slots, _round_up(length, CHUNK))

    def commit(self, blocks: Blocks, tokens: Sequence[int], stored: int) -> None:
        """Record that the keys and values of the first `stored` tokens are stored."""
        blocks.stored = stored

    def release(self, blocks: Blocks) -> None:
        """Remove a sequence, and free its blocks."""
        self._sequences[blocks.numbers[0]] = None
        blocks.numbers = []

    def compact(self) -> None:
        """Move the sequences in the last slots into free slots."""
        sequences = self._sequences
        while sequences and sequences[-1] is None:
            sequences.pop()
        while None in sequences:
            hole, moved = sequences.index(None), sequences.pop()
            assert moved is not None
            (source,) = moved.numbers
            self.memory.move(source, hole, moved.stored)
            sequences[hole], moved.numbers = moved, [hole]
            self.moves += 1
            while sequences and sequences[-1] is None:
                sequences.pop()
        if not sequences and self._slots:
            self.block_length, self._slots = 0, 0
            self.memory.resize(0, 0, 0, 0)

    def check(self) -> None:
        """Raise RuntimeError if the records of the store are inconsistent."""
        for slot, blocks in enumerate(self._sequences):
            if blocks is not None and blocks.numbers != [slot]:
                raise RuntimeError(
                    f"KV cache: slot {slot} is assigned to a sequence with the slots {blocks.numbers}"
                )

    def _grow(self, slots: int, length: int) -> None:
        """Reallocate the tensors for more or longer slots, and copy the stored positions."""
        if (slots, length) == (self._slots, self.block_length):
            return
        fitting = self.capacity // max(length, CHUNK)
        if slots > self._slots:
            slots = max(slots, min(2 * self._slots, fitting))
        elif length > self.block_length:  # fewer, longer slots
            slots = max(len(self._sequences), min(slots, fitting))
        stored = max((each.stored for each in self._sequences if each is not None), default=0)
        self.memory.resize(slots, length, min(slots, self._slots), _round_up(stored, TILE))
        self._slots, self.block_length = slots, length


class PageStore:
    """A store with pages of 16 positions.  Sequences with the same first tokens share pages.

    Pages of removed sequences stay available for sharing until their memory is needed.  The least recently used page is
    reused first.

    Args:
        memory: the tensors.
        positions: the number of positions that fit in memory.
        sharing: whether sequences can share pages.
    """

    unit = TILE

    def __init__(self, memory: Memory, positions: int, *, sharing: bool = True) -> None:
        self._pages = positions // TILE
        self._sharing = sharing
        self.block_length, self.moves = TILE, 0
        self.memory = memory
        memory.resize(self._pages, TILE, 0, 0)
        self._free = list(range(self._pages - 1, -1, -1))
        self._cached: OrderedDict[int, bytes] = OrderedDict()  # unused pages with content, oldest first
        self._users = [0] * self._pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._reserved = 0  # pages reserved for the running sequences
        self._sequences: set[Blocks] = set()
        self.shared = 0

    @property
    def capacity(self) -> int:
        """Return the number of positions that fit in memory."""
        return self._pages * TILE

    @property
    def used(self) -> int:
        """Return the number of positions in pages that running sequences use."""
        return (self._pages - len(self._free) - len(self._cached)) * TILE

    @property
    def blocks(self) -> int:
        """Return the number of pages."""
        return self._pages

    @property
    def cached(self) -> list[int]:
        """Return the unused pages whose content can be shared, least recently used first."""
        return list(self._cached)

    def add(self, tokens: Sequence[int], most: int, *, share: bool = True, model: str = "") -> Blocks | None:
        """Add a sequence; see `Store.add`."""
        found: list[int] = []
        digests: list[bytes] = []
        if self._sharing and share:
            for digest in _digests(tokens[: (len(tokens) - 1) // TILE * TILE], model.encode()):
                if (page := self._page_of.get(digest)) is None:
                    break
                found.append(page)
                digests.append(digest)
        more = -(-most // TILE) - len(found)
        unused = sum(self._users[page] == 0 for page in found)
        if more + unused + self._reserved > len(self._free) + len(self._cached):
            return None
        for page in found:
            self._use(page)
        self._reserved += more
        self.shared += len(found) * TILE
        blocks = Blocks(most, found, len(found) * TILE, digests, model)
        self._sequences.add(blocks)
        return blocks

    def reserve(self, blocks: Blocks, length: int) -> None:
        """Allocate pages for the first `length` positions of a sequence."""
        while len(blocks.numbers) * TILE < length:
            if self._free:
                page = self._free.pop()
            else:
                page, digest = self._cached.popitem(last=False)
                del self._page_of[digest], self._digest_of[page]
            self._users[page] = 1
            self._reserved -= 1
            blocks.numbers.append(page)

    def commit(self, blocks: Blocks, tokens: Sequence[int], stored: int) -> None:
        """Record that the keys and values of the first `stored` tokens are stored, and make complete pages shareable."""
        blocks.stored = stored
        first = len(blocks.digests)
        if not self._sharing or stored // TILE == first:
            return
        before = blocks.digests[-1] if blocks.digests else blocks.model.encode()
        new = _digests(tokens[first * TILE : stored // TILE * TILE], before)
        for number, digest in enumerate(new, first):
            blocks.digests.append(digest)
            page = blocks.numbers[number]
            if digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest], self._digest_of[page] = page, digest

    def release(self, blocks: Blocks) -> None:
        """Remove a sequence, and keep its shareable pages in the cache.

        The last pages of the sequence are evicted first.
        """
        self._reserved -= -(-blocks.most // TILE) - len(blocks.numbers)
        for page in reversed(blocks.numbers):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._digest_of:
                    self._cached[page] = self._digest_of[page]
                else:
                    self._free.append(page)
        blocks.numbers = []
        self._sequences.remove(blocks)

    def compact(self) -> None:
        """Do nothing, because pages need not be contiguous."""

    def check(self) -> None:
        """Raise RuntimeError if the records of the store are inconsistent."""
        users = [0] * self._pages
        for blocks in self._sequences:
            for page in blocks.numbers:
                users[page] += 1
        if users != self._users:
            raise RuntimeError("KV cache: the reference count of a page is wrong")
        unused = [page for page, count in enumerate(users) if not count]
        if sorted([*self._free, *self._cached]) != unused:
            raise RuntimeError(
                "KV cache: an unused page is missing from the free list, or a used page is in it"
            )
        reserved = sum(-(-each.most // TILE) - len(each.numbers) for each in self._sequences)
        if reserved != self._reserved:
            raise RuntimeError(f"KV cache: {self._reserved} pages are reserved, expected {reserved}")

    def _use(self, page: int) -> None:
        if self._users[page] == 0:
            del self._cached[page]
        self._users[page] += 1


def _digests(tokens: Sequence[int], before: bytes) -> list[bytes]:
    """Return the hash of each page, which depends on `before` and all tokens up to the end of the page."""
    found = []
    for start in range(0, len(tokens), TILE):
        content = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + TILE])
        before = hashlib.blake2b(before + content, digest_size=16).digest()
        found.append(before)
    return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


STORES: dict[str, type[SlotStore] | type[PageStore]] = {"slots": SlotStore, "pages": PageStore}
"""The classes of stores, keyed by the value of the option `store`."""
