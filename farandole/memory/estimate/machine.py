"""What a machine offers to each rank of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from farandole.memory.disk import Bandwidth

PROCESS_BYTES = 225 << 20
LIBRARY_BYTES = 110 << 20
"""Of a rank on a CPU host that has trained a step of a tiny model (torch 2.13, Linux): its own pages, and those of
libraries, which all ranks of the host share.  `farandole plan` measures them."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One rank's share of a machine, all ranks working at once.

    memory: bytes that a rank may use: of its accelerator, or its share of the host's.
    flops: operations per second of matrix products, by precision ("fp32", "bf16", "fp16").
    stream: bytes per second that other operations read and write.
    bandwidth: bytes per second between ranks, as nccl-tests' bus bandwidth counts them.
    disk: the bandwidth of the disk for all ranks together; None if nothing is kept there.
    process, libraries: bytes of a process that has not been given a model: its own, and pages of files that all
        ranks of a host share.
    hosts: on how many hosts the ranks are, equally many on each.
    shared: whether the ranks of a host share memory, and with it one copy of what they have in common.
    overlap: whether communication goes on beside computation: not where the same cores do both.
    host: whether `memory` is that of the host, where checkpoints are copied and states are offloaded to.
    """

    memory: int
    flops: Mapping[str, float] = field(default_factory=lambda: {"fp32": 50e9, "bf16": 50e9, "fp16": 50e9})
    stream: float = 8e9
    bandwidth: float = 2e9
    disk: Bandwidth | None = None
    process: int = PROCESS_BYTES
    libraries: int = LIBRARY_BYTES
    hosts: int = 1
    shared: bool = True
    overlap: bool = False
    host: bool = True

    def __post_init__(self) -> None:
        for name in ("memory", "stream", "bandwidth"):
            if getattr(self, name) <= 0:
                raise ValueError(f"Machine({name}={getattr(self, name)}): more than 0 is needed")
        for name, speed in self.flops.items():
            if speed <= 0:
                raise ValueError(f"Machine(flops={{{name!r}: {speed}}}): more than 0 is needed")
