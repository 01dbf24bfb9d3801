"""What a step costs on the disk: bytes, and seconds at the speed that this disk was seen to have."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farandole.data.wording import size
from farandole.memory.disk_file import DEPTH, PART_BYTES, RecordFile
from farandole.memory.errors import NoSpace
from farandole.memory.file_system import free_bytes, require_folder
from farandole.memory.scratch import aligned_buffer
from farandole.memory.transfer import Transfer

_LIMIT_BYTES = 256 << 20
_LIMIT_S = 1.0


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of a disk, one direction at a time, and how it was reached."""

    read: float
    write: float
    access: str

    def __str__(self) -> str:
        return f"{size(self.read)}/s read, {size(self.write)}/s write ({self.access})"


@dataclass(frozen=True)
class Budget:
    """Bytes that a step reads and writes, and the bandwidth there is for it, if it was measured."""

    read_bytes: int
    written_bytes: int
    bandwidth: Bandwidth | None = None

    @classmethod
    def of_records(cls, record_bytes: Sequence[int], bandwidth: Bandwidth | None = None) -> Budget:
        """The budget of a step that reads and writes every record once."""
        return cls(sum(record_bytes), sum(record_bytes), bandwidth)

    @property
    def seconds(self) -> float | None:
        """How long the disk takes for a step, if nothing else uses it."""
        if self.bandwidth is None:
            return None
        return self.read_bytes / self.bandwidth.read + self.written_bytes / self.bandwidth.write

    def __str__(self) -> str:
        text = f"each step reads {size(self.read_bytes)} and writes {size(self.written_bytes)}"
        return text if self.seconds is None else f"{text}: about {self.seconds:.2g} s at {self.bandwidth}"


def measure_bandwidth(folder: str | os.PathLike[str], limit_bytes: int = _LIMIT_BYTES) -> Bandwidth:
    """Write and read back random bytes in `folder` for at most about a second and `limit_bytes`.

    In the way in which `RecordFile` does it: direct where that can be, several requests at a time.  Raises
    `OffloadError` where that cannot be done.
    """
    room = min(limit_bytes, free_bytes(require_folder(folder)))
    if room < PART_BYTES:
        raise NoSpace(f"measuring the disk of {folder} takes {size(PART_BYTES)}; {size(room)} can be used")
    file = RecordFile(folder, [PART_BYTES] * (room // PART_BYTES), "random bytes")
    try:
        own = torch.Generator().manual_seed(0)  # measuring changes nothing for who draws random numbers
        buffers = [aligned_buffer(PART_BYTES).random_(generator=own) for _ in range(2 * DEPTH)]
        written, write = _pass(file, buffers, len(file.record_bytes), reading=False)
        _, read = _pass(file, buffers, written, reading=True)
        return Bandwidth(read, write, file.access)
    finally:
        file.close()


def _pass(file: RecordFile, buffers: list[Tensor], records: int, reading: bool) -> tuple[int, float]:
    """Move up to `records` records within half the time there is: how many, and the bytes per second."""
    start = time.perf_counter()
    moving: list[Transfer] = []
    for record in range(records):
        before = moving[-len(buffers)] if record >= len(buffers) else None
        if before is not None:
            before.wait()
        if time.perf_counter() - start > _LIMIT_S / 2:
            break
        move = file.read if reading else file.write
        moving.append(move(record, buffers[record % len(buffers)]))
    for transfer in moving:
        transfer.wait()
    return len(moving), len(moving) * PART_BYTES / (time.perf_counter() - start)
