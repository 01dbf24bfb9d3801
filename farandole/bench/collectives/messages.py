"""Time messages between ranks 0 and 1.

The latency is half the time of a ping-pong.  The bandwidth is measured with windows of `WINDOW` outstanding messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from farandole.bench.collectives.implementations import Implementation
from farandole.bench.collectives.measure import Buffers, Case, Row, take_turns, values_of_all_ranks
from farandole.bench.collectives.operations import ROOT, WINDOW
from farandole.bench.collectives.values import count_errors, values


class Exchange:
    """Times messages of one size between ranks 0 and 1 with one implementation; other ranks only wait."""

    def __init__(self, implementation: Implementation, case: Case) -> None:
        operation, setup, comm = case.operation, case.setup, case.comm
        self.implementation = implementation
        self.seconds = 0.0
        self.errors = 0
        self._is_first, self._peer = comm.rank == ROOT, 1 - comm.rank
        self._buffers = Buffers(implementation, case)
        self._acknowledgement = implementation.empty(4, torch.uint8).zero_()
        self._begin: Callable[[], None] = {
            "latency": self._ping_pong,
            "bw": self._stream,
            "bibw": self._streams,
        }[operation.name]
        receives = operation.name != "bw" or not self._is_first
        self._checked = setup.validate and comm.rank < 2 and receives
        self._takes_part = comm.rank < 2
        if setup.validate:
            fill = partial(values, count=self._buffers.elements, dtype=setup.kind, reduction=None)
            self._buffers.input.copy_(fill(comm.rank))
            self._wanted = fill(self._peer if self._takes_part else ROOT).to(self._buffers.output.device)

    def run(self, iterations: int) -> None:
        """Run `iterations` round trips or message windows, depending on the operation."""
        for _ in range(iterations if self._takes_part else 0):
            if self._checked:
                self._buffers.output.copy_(self._wanted).add_(1)
            begun = time.perf_counter()
            self._begin()
            self.seconds += time.perf_counter() - begun
            if self._checked:
                self.errors += count_errors(self._buffers.output, self._wanted, 1)

    def _ping_pong(self) -> None:
        library, peer = self.implementation, self._peer
        if self._is_first:
            library.send(self._buffers.input, peer)
            library.receive(self._buffers.output, peer)
        else:
            library.receive(self._buffers.output, peer)
            library.send(self._buffers.input, peer)

    def _stream(self) -> None:
        """Send a window of messages from rank 0 to rank 1, which acknowledges the whole window with one message."""
        library, peer = self.implementation, self._peer
        if self._is_first:
            waits = [library.begin_send(self._buffers.input, peer) for _ in range(WINDOW)]
        else:
            waits = [library.begin_receive(self._buffers.output, peer) for _ in range(WINDOW)]
        self._end(waits)

    def _streams(self) -> None:
        """Send a window of messages in each direction at the same time."""
        library, peer = self.implementation, self._peer
        waits = [library.begin_receive(self._buffers.output, peer) for _ in range(WINDOW)]
        waits += [library.begin_send(self._buffers.input, peer) for _ in range(WINDOW)]
        self._end(waits)

    def _end(self, waits: list[Callable[[], object]]) -> None:
        for wait in waits:
            wait()
        if self._is_first:
            self.implementation.receive(self._acknowledgement, self._peer)
        else:
            self.implementation.send(self._acknowledgement, self._peer)


def measure_messages(implementations: list[Implementation], case: Case) -> list[Row]:
    """Measure `case` with each implementation, and return one row per implementation.

    Depending on the operation, the row contains the one-way latency in microseconds or the bandwidth in MB/s, both
    measured on rank 0.
    """
    iterations, warmup = case.counts
    trials = [Exchange(implementation, case) for implementation in implementations]
    for trial in trials:
        case.comm.barrier()
        trial.run(warmup)
        trial.seconds = 0.0
    take_turns([trial.run for trial in trials], iterations, case.comm)
    rows = []
    for trial in trials:
        seconds = float(values_of_all_ranks(trial.seconds, case.comm)[ROOT]) / iterations
        if case.operation.is_bandwidth:
            directions = 2 if case.operation.name == "bibw" else 1
            row = case.row(trial.implementation, mb_per_s=directions * WINDOW * case.size / seconds / 1e6)
        else:
            row = case.row(trial.implementation, avg_us=seconds / 2 * 1e6)
        if case.setup.validate:
            row["errors"] = int(values_of_all_ranks(trial.errors, case.comm).sum())
        rows.append(row)
    return rows
