"""A server with one receiving thread per worker and one main loop.

The threads only receive data.  They pass a gradient to the loop only when it is complete, so a dead worker's
partial gradient is never applied.  Only the loop accesses the parameters, the optimizer and the clocks, so no locks
are needed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farandole.comm.notices import warn_once
from farandole.data.wording import counted
from farandole.parallel.parameter_server.channel import Channel, Header, Kind, Plan, in_order
from farandole.parallel.parameter_server.errors import AllWorkersLost, ServerLost
from farandole.parallel.parameter_server.layout import Buffers
from farandole.parallel.parameter_server.schedule import Contribution, Schedule
from farandole.parallel.parameter_server.shard import Shard

BEATS_PER_TIMEOUT = 4


@dataclass
class Report:
    """A server's statistics.  Workers are identified by their ranks."""

    updates: int = 0
    """The number of optimizer steps."""
    pushes: dict[int, int] = field(default_factory=dict)
    """The number of gradients from each worker."""
    staleness: list[int] = field(default_factory=list)
    """For each gradient, the number of updates since its worker pulled the parameters."""
    most_lead: int = 0
    """The maximum number of gradients by which a worker that received parameters was ahead of the slowest worker."""
    lost: dict[int, str] = field(default_factory=dict)
    """The lost workers, and the reason for each."""


@dataclass(frozen=True)
class Event:
    """A message from a worker's thread, or the end of the connection if `header` is None."""

    worker: int
    header: Header | None
    contribution: Contribution | None = None
    text: str = ""


class Server:
    """Serves the workers of one session until all of them have left.

    Args:
        channels: a dict that maps each worker's rank to the channel to that worker.
        timeout_s: the timeout of the channels in seconds.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        shard: Shard,
        schedule: Schedule,
        channels: Mapping[int, Channel],
        timeout_s: float,
    ) -> None:
        self.report = Report(pushes=dict.fromkeys(channels, 0))
        self._plan = plan
        self._rank = rank
        self._shard = shard
        self._schedule = schedule
        self._channels = dict(channels)
        self._beat_s = timeout_s / BEATS_PER_TIMEOUT
        self._here = set(channels)
        self._asking: dict[int, Kind] = {}
        self._finished: set[int] = set()
        self._filled = False  # whether the first parameters have arrived
        self._wanted_from: int | None = None
        self._replies: dict[int, Buffers] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def serve(self) -> Report:
        """Run the session until every worker has left, and return the statistics.

        Raises:
            AllWorkersLost: if all workers are lost.
            ServerLost: if a worker reports the loss of another server.
            ValueError: if a worker has different session options.
        """
        listeners = {
            worker: threading.Thread(
                target=self._listen, args=(worker,), name=f"farandole-worker-{worker}", daemon=True
            )
            for worker in self._channels
        }
        for listener in listeners.values():
            listener.start()
        next_beat = time.monotonic() + self._beat_s
        while self._here:
            with contextlib.suppress(queue.Empty):
                self._handle(self._events.get(timeout=max(0.0, next_beat - time.monotonic())))
                self._answer()
            if time.monotonic() >= next_beat:
                self._send_wait()
                next_beat = time.monotonic() + self._beat_s
        for worker, listener in listeners.items():
            if worker not in self.report.lost:  # the thread ends with the worker's last message
                listener.join()  # the interpreter aborts if a thread frees tensors during shutdown
        if not self._finished:
            raise AllWorkersLost(
                f"the server (rank {self._rank}) has lost all its workers: {self._lost_workers()}; start the job again"
            )
        self.report.updates = self._shard.version
        return self.report

    # ---- the receiving threads ----

    def _listen(self, worker: int) -> None:
        channel, packing = self._channels[worker], self._shard.packing
        gradients = (
            packing.buffers()
        )  # one set of buffers is enough, because the next push follows the answer to a pull
        try:
            while True:
                header = channel.receive()
                contribution, text = None, ""
                if header.kind is Kind.PUSH:
                    has = torch.empty(len(packing.pieces), dtype=torch.bool)
                    channel.receive_into([has, *in_order(gradients)])
                    contribution = Contribution(has.tolist(), gradients, header.weight)
                elif header.kind is Kind.PARAMETERS:
                    channel.receive_into(in_order(gradients))
                    contribution = Contribution([], gradients, 1.0)
                elif header.kind is Kind.LOST:
                    text = channel.receive_text()
                self._events.put(Event(worker, header, contribution, text))
                if header.kind is Kind.LEAVE:
                    return
        except Exception as error:  # the loop handles exceptions of threads
            self._events.put(Event(worker, None, text=str(error)))

    # ---- the main loop ----

    def _handle(self, event: Event) -> None:
        worker, header, contribution = event.worker, event.header, event.contribution
        if worker not in self._here:
            return  # lost meanwhile
        if header is None:
            self._lose(worker, event.text)
            return
        match header.kind:
            case Kind.HELLO:
                self._accept(worker, header.number)
            case Kind.PULL:
                self._asking[worker] = Kind.PULL
            case Kind.PUSH:
                assert contribution is not None
                self.report.pushes[worker] += 1
                self.report.staleness.append(self._shard.version - header.version)
                self._schedule.push(worker, contribution)
            case Kind.PARAMETERS:
                assert contribution is not None
                for dtype, values in contribution.gradients.items():
                    self._shard.values[dtype].copy_(values)
                self._filled = True
            case Kind.FINISH:
                self._finished.add(worker)
                self._asking[worker] = Kind.FINISH
                self._schedule.leave(worker)
            case Kind.LEAVE:
                self._here.discard(worker)
            case Kind.LOST:
                raise ServerLost(f"rank {worker} reports: {event.text}")
            case _:
                pass  # ALIVE needs no action

    def _accept(self, worker: int, fingerprint: int) -> None:
        if fingerprint != self._plan.fingerprint:
            reason = (
                f"rank {worker} and the server (rank {self._rank}) have different session options or model shapes, "
                "which must be equal on all ranks"
            )
            self._channels[worker].send_text(Kind.REFUSED, f"{reason}: the server has {self._plan.summary}")
            raise ValueError(f"{reason}: the server has {self._plan.summary}")
        self._post(worker, Header(Kind.WELCOME))

    def _lose(self, worker: int, reason: str) -> None:
        """Exclude a lost worker from the session, and print a warning."""
        self._here.discard(worker)
        self._finished.discard(worker)
        self._asking.pop(worker, None)
        self._schedule.leave(worker)
        self.report.lost[worker] = reason
        if self._wanted_from == worker:
            self._wanted_from = None
        rest = len(self._here)
        warn_once(
            f"the server (rank {self._rank}) continues with {counted(rest, 'worker')}, without rank {worker}: {reason}"
        )

    def _answer(self) -> None:
        """Send parameters to each waiting worker that may continue."""
        if not self._filled:
            self._want_parameters()
            return
        for worker, kind in list(self._asking.items()):
            if self._finished >= self._here if kind is Kind.FINISH else self._schedule.may_pull(worker):
                del self._asking[worker]
                if kind is Kind.PULL:
                    self.report.most_lead = max(self.report.most_lead, self._schedule.lead(worker))
                self._reply(worker)

    def _want_parameters(self) -> None:
        """Request the initial parameters from the first worker if that worker is waiting for parameters."""
        if self._here and self._wanted_from is None and (first := min(self._here)) in self._asking:
            self._wanted_from = first
            self._post(first, Header(Kind.WANTED))

    def _reply(self, worker: int) -> None:
        into = self._replies.setdefault(worker, self._shard.packing.buffers())
        header = Header(Kind.PARAMETERS, version=self._shard.version)
        self._post(worker, header, self._shard.snapshot(into))

    def _send_wait(self) -> None:
        """Send WAIT to all waiting workers, so that no channel times out."""
        for worker in list(self._asking):
            self._post(worker, Header(Kind.WAIT))

    def _post(self, worker: int, header: Header, tensors: Sequence[Tensor] = ()) -> None:
        try:
            self._channels[worker].post(header, tensors)
        except RuntimeError as error:  # Gloo reports immediately that the other end is gone
            self._lose(worker, str(error))

    def _lost_workers(self) -> str:
        return "; ".join(f"rank {worker}: {reason}" for worker, reason in self.report.lost.items())
