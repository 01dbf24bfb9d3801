"""The engine of one process set: a request queue, and a thread that executes the requests in cycles.

This module decides when a cycle begins.  `negotiation` describes the cycle protocol and proves its correctness.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from farandole.horovod.execution import Executor
from farandole.horovod.monitoring import StallInspector, Timeline
from farandole.horovod.negotiation import HEARTBEAT_S, Negotiator
from farandole.horovod.requests import UNNAMED, HorovodInternalError, Request

UNSUPPORTED = {
    "HOROVOD_AUTOTUNE": "set HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME manually",
    "HOROVOD_AUTOTUNE_LOG": "farandole has no autotuner",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "ranks on one host always reduce in shared memory",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "ranks on one host always gather in shared memory",
    "HOROVOD_GPU_OPERATIONS": "select the backend for device tensors with farandole.init(backend)",
    "HOROVOD_CPU_OPERATIONS": "select the backend for CPU tensors with farandole.init(backend)",
    "HOROVOD_CONTROLLER": "negotiation uses the process group of farandole.init()",
    "HOROVOD_DISABLE_GROUP_FUSION": "groups are fused; HOROVOD_FUSION_THRESHOLD=0 disables fusion",
}
"""Environment variables of Horovod that have no effect here, each with the reason or an alternative."""


@dataclass(frozen=True)
class Settings:
    """The engine options.  `fusion_threshold` is in bytes, and `cache_capacity` is a number of names."""

    cycle_time_s: float = 0.001
    fusion_threshold: int = 128 << 20
    cache_capacity: int = 1024
    timeline: str = ""
    timeline_marks_cycles: bool = False
    stall_check_s: float | None = 60.0
    stall_shutdown_s: float = 0.0

    @staticmethod
    def read(environ: Mapping[str, str]) -> Settings:
        """Read the settings from environment variables.

        Raises:
            ValueError: if a variable is not a number, is negative or is infinite.
        """
        disabled = _flag(environ, "HOROVOD_STALL_CHECK_DISABLE")
        return Settings(
            cycle_time_s=_number(environ, "HOROVOD_CYCLE_TIME", 1.0) / 1000,
            fusion_threshold=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", 128 << 20)),
            cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", 1024)),
            timeline=environ.get("HOROVOD_TIMELINE", ""),
            timeline_marks_cycles=_flag(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
            stall_check_s=None if disabled else _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
            stall_shutdown_s=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        )


def unsupported(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each environment variable that is set but has no effect."""
    return [
        f"{name}={environ[name]} has no effect; {instead}"
        for name, instead in UNSUPPORTED.items()
        if environ.get(name, "") not in ("", "0")
    ]


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "") not in ("", "0")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"expected {name} to be a number, got {text!r}") from None
    if not 0 <= number < float("inf"):
        raise ValueError(f"expected {name} to be finite and at least 0, got {text}")
    return number


_CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for the engine's thread, in seconds.

Live ranks join a cycle within `HEARTBEAT_S`.
"""

SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks, or by an operation "
    "submitted after one of the ranks finished execution."
)


@dataclass(frozen=True)
class Groups:
    """The process groups reserved for a process set's engine."""

    control: dist.ProcessGroup
    data: dist.ProcessGroup


class Engine:
    """Executes requests from any thread, in the same order on all ranks of the process set.

    Args:
        groups: The process groups of the process set.
        ranks: The members' ranks in the world.
        settings: The engine options.
        timeline: The timeline.
        limit_s: The default stall time after which the run ends.
    """

    def __init__(
        self, groups: Groups, ranks: Sequence[int], settings: Settings, timeline: Timeline, limit_s: float
    ) -> None:
        self._groups = groups
        self._cycle_time_s = settings.cycle_time_s
        self._timeline = timeline
        self._negotiator = Negotiator(groups.control, ranks, settings.cache_capacity)
        self._executor = Executor(groups.data, ranks, settings.fusion_threshold, timeline)
        logs_warnings = groups.control.rank() == 0
        warn_s, shutdown_s = settings.stall_check_s, settings.stall_shutdown_s
        self._stall = StallInspector(ranks, warn_s, shutdown_s, limit_s, logs_warnings)
        self._warn_s = warn_s
        self._heartbeat_s = min(HEARTBEAT_S, (warn_s or HEARTBEAT_S) / 4)

        self._submitted: deque[Request] = deque()
        self._unnamed: Counter[str] = Counter()
        self._in_flight: dict[str, Request] = {}
        self._wake = threading.Condition()
        self._asleep = False  # whether the thread must be woken for a new request
        self._waiters = 0  # threads that wait for a result; if positive, the next cycle begins at once
        self._next_cycle = 0.0
        self._closing = False
        self._ended: BaseException | None = None
        self.last_joined = -1
        self.cycles = 0
        self._thread = threading.Thread(target=self._main, name="farandole-horovod", daemon=True)
        self._thread.start()

    # ---- methods for other threads ----

    def name_for(self, kind: str) -> str:
        """Generate a name for an unnamed request.

        Ranks that submit unnamed requests in the same order get the same names.
        """
        with self._wake:
            number = self._unnamed[kind]
            self._unnamed[kind] += 1
        return f"{kind}{UNNAMED}{number}"

    def submit(self, request: Request) -> None:
        """Enqueue a request.

        Raises:
            ValueError: if a request with the same name is in flight.
            HorovodInternalError: if the engine has ended.
        """
        if self._in_flight.setdefault(request.name, request) is not request:
            raise ValueError(
                f"Requested to {request.signature.kind} a tensor with the same name as another tensor that is "
                f"currently being processed: {request.name}. If you want to request another tensor, use a "
                f"different tensor name."
            )
        self._submitted.append(request)
        if self._ended is not None:
            self._in_flight.pop(request.name, None)
            raise self._refusal()
        if self._asleep:
            with self._wake:
                self._wake.notify()

    def wait(self, request: Request) -> None:
        """Block until a request finishes, and raise its error if it failed."""
        if not request.finished():
            with self._wake:
                self._waiters += 1
                self._wake.notify()
            try:
                request.wait()
            finally:
                with self._wake:
                    self._waiters -= 1
        else:
            request.wait()

    def drain(self) -> None:
        """Wait for all of this rank's requests in flight, and ignore their errors."""
        for request in list(self._in_flight.values()):
            with contextlib.suppress(HorovodInternalError):
                self.wait(request)

    def request_close(self) -> None:
        """Ask the engines on all ranks to shut down.  Requests in flight fail."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def close(self) -> None:
        """Shut down the engine and wait for its thread.

        If the thread does not end in time, abort the running collectives and wait again.
        """
        self.request_close()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():  # another rank hangs, or died without being detected
            self._abort()
            self._thread.join(_CLOSE_TIMEOUT_S)

    # ---- the engine thread ----

    def _main(self) -> None:
        torch.get_num_threads()  # applies `torch.set_num_threads` to this thread
        try:
            with torch.no_grad():  # autograd forbids in-place writes to parameters, which are leaves
                reason = self._serve()
            self._end(HorovodInternalError(reason))
        except BaseException as error:  # otherwise waiting threads and ranks would block forever
            self._end(error)
            self._abort()

    def _serve(self) -> str:
        """Run cycles until the process set is shut down, and return the reason for the shutdown."""
        negotiator, progress, reason = self._negotiator, True, None
        while True:
            self._pause(progress)
            began = time.monotonic()
            fresh = bool(self._submitted)
            negotiator.take(self._drain_submitted())
            if self._closing:
                reason = SHUT_DOWN
            if self._warn_s is not None and negotiator.pending():
                negotiator.invalidate_older_than(began - self._warn_s)
                reason = reason or self._stall.check(negotiator.table, negotiator.joined)
            outcome = negotiator.cycle(reason)
            self.cycles += 1
            if outcome.last_joined is not None:
                self.last_joined = outcome.last_joined
                with self._wake:
                    self._unnamed.clear()  # ranks that joined early have generated fewer names
            if outcome.ready:
                if self._timeline.active and self._timeline.marks_cycles:
                    self._timeline.mark("CYCLE_START")
                self._executor.run(outcome.ready, self._finish)
            if outcome.shutdown is not None:
                return outcome.shutdown
            progress = fresh or bool(outcome.ready)
            self._next_cycle = began + self._cycle_time_s

    def _pause(self, progress: bool) -> None:
        """Sleep until the next cycle."""
        if not (self._submitted or self._negotiator.pending() or self._closing):
            with self._wake:
                self._asleep = True
                if not (self._submitted or self._closing):
                    self._wake.wait(self._heartbeat_s)
                self._asleep = False
        # wait for the cycle time, so that more requests can be fused, unless a thread is waiting for a result
        while (left := self._next_cycle - time.monotonic()) > 0:
            with self._wake:
                if self._closing or (self._waiters and (progress or self._submitted)):
                    return
                self._wake.wait(left)

    def _drain_submitted(self) -> list[Request]:
        requests = []
        while self._submitted:
            requests.append(self._submitted.popleft())
        return requests

    def _finish(self, request: Request, error: BaseException | None) -> None:
        self._in_flight.pop(request.name, None)
        request.finish(error)

    def _end(self, error: BaseException) -> None:
        """Fail all requests in flight and all later requests with `error`."""
        self._ended = error
        self._negotiator.drop_all()
        for request in list(self._in_flight.values()):
            if self._in_flight.pop(request.name, None) is not None:
                request.finish(error)

    def _refusal(self) -> HorovodInternalError:
        return HorovodInternalError(str(self._ended))

    def _abort(self) -> None:
        """Abort the running collectives, so that no rank waits for this rank."""
        for group in (self._groups.control, self._groups.data):
            with contextlib.suppress(
                RuntimeError
            ):  # Gloo cannot abort; its peers detect the closed connection
                group.abort()
