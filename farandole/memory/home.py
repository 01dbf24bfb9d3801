"""Where records of state live: in memory or on a disk, through one interface."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from farandole.data.wording import size
from farandole.memory.disk_file import RecordFile
from farandole.memory.stream import Stream, Work


class StateHome(Protocol):
    """Records of fixed sizes: how they are gone over, changed and made.

    See `Stream` for what each method does.
    """

    record_bytes: tuple[int, ...]
    waited_s: float

    @property
    def access(self) -> str:
        """Where the records are and how they are reached, for people."""

    @property
    def memory_bytes(self) -> int:
        """What of them is in memory."""

    def prefetch(self, record: int) -> bool:
        """Start to bring `record` near."""

    def update(self, order: Iterable[int], work: Work) -> None:
        """Call `work(record, bytes)` for each record in `order`, and keep what it makes of the bytes."""

    def fill(self, order: Iterable[int], work: Work) -> None:
        """The same where `work` makes the bytes anew."""

    def visit(self, order: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Each record in `order` and its bytes, valid until the next and not to be changed."""

    def flush(self) -> None:
        """Return when everything is where it belongs; raise what went wrong on the way."""

    def close(self) -> None:
        """Give the space back; may be called again."""


class MemoryHome:
    """Records in the memory of this host; `pinned`, so that a CUDA device copies to and from it at full speed."""

    def __init__(self, record_bytes: Sequence[int], pinned: bool = False) -> None:
        if pinned and not torch.cuda.is_available():
            raise ValueError(
                "pinned=True: memory is pinned for a CUDA device, and there is none; pinned=False works"
            )
        self.record_bytes = tuple(record_bytes)
        self.waited_s = 0.0
        self._pinned = pinned
        self._records = [
            torch.empty(n, dtype=torch.uint8, pin_memory=pinned, device="cpu") for n in record_bytes
        ]

    @property
    def access(self) -> str:
        """Where the records are, for people."""
        return f"{'pinned ' if self._pinned else ''}memory, {size(sum(self.record_bytes))}"

    @property
    def memory_bytes(self) -> int:
        """All of them."""
        return sum(self.record_bytes)

    def prefetch(self, record: int) -> bool:
        """True: every record is here."""
        return 0 <= record < len(self._records)

    def update(self, order: Iterable[int], work: Work) -> None:
        """Call `work(record, bytes)` for each record in `order`."""
        for record in order:
            work(record, self._records[record])

    fill = update

    def visit(self, order: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Each record in `order` and its bytes."""
        return ((record, self._records[record]) for record in order)

    def flush(self) -> None:
        """Return at once: nothing is on its way."""

    def close(self) -> None:
        """Give the memory back."""
        self._records = []


class DiskHome(Stream):
    """Records in a scratch file of their own in `folder`, which pass through `buffers` buffers in memory.

    `name` says in errors what is kept.  Raises `OffloadError` as `RecordFile` does.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        record_bytes: Sequence[int],
        name: str = "optimizer state",
        buffers: int = 3,
    ) -> None:
        super().__init__(RecordFile(folder, record_bytes, name), buffers)

    @property
    def access(self) -> str:
        """Which disk, and how it is reached, for people."""
        return self.file.access

    def close(self) -> None:
        """Wait until nothing moves, and give the space back; may be called again."""
        super().close()
        self.file.close()
