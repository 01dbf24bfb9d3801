"""Record the timeline, and detect stalled tensors.

The timeline is a file for Perfetto or chrome://tracing.  Each tensor is a "process" in the trace, as in Horovod.
NEGOTIATE_ALLREDUCE lasts from this rank's request until all ranks have requested the tensor.  ALLREDUCE follows, and
contains MEMCPY_IN_FUSION_BUFFER, the collective and MEMCPY_OUT_FUSION_BUFFER.  The file format is the JSON array form
of the Chromium project's "Trace Event Format".

A tensor is stalled if some ranks have requested the tensor but other ranks have not done so within a time limit.  The
negotiation table is the same on all ranks, so each rank can determine which ranks are missing.  The first rank in the
process set logs a warning, and any rank may end the run.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TextIO

from farandole._troubleshooting import see


class Timeline:
    """Writes one rank's events to a file.  Without a file, events are ignored and `active` is False."""

    def __init__(self) -> None:
        self.active = False
        self.marks_cycles = False
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._lines: list[str] = []
        self._separator = "[\n"
        self._start = 0.0

    def start(self, path: str, marks_cycles: bool) -> None:
        """Start writing the timeline to the file at `path`.

        Raises:
            ValueError: if a timeline is already being written.
            OSError: if the file cannot be written.
        """
        with self._lock:
            if self._file is not None:
                raise ValueError(
                    f"a timeline is already being written to {self._file.name}; call hvd.stop_timeline() first"
                )
            self._file = open(path, "w")  # noqa: SIM115 - closed by `stop`
            self._numbers, self._lines, self._separator = {}, [], "[\n"
            self._start = time.monotonic()
            self.marks_cycles = marks_cycles
            self.active = True

    def stop(self) -> None:
        """Complete the JSON and close the file, if a file is open."""
        with self._lock:
            self.active = False
            if self._file is None:
                return
            self._flush()
            self._file.write("\n]\n" if self._numbers else "[]\n")
            self._file.close()
            self._file = None

    def span(
        self, name: str, activity: str, begin: float, end: float, arguments: dict[str, Any] | None = None
    ) -> None:
        """Record a tensor's activity.  `begin` and `end` are `time.monotonic` values."""
        with self._lock:
            if self._file is None:
                return
            event: dict[str, Any] = {
                "ph": "X",
                "name": activity,
                "pid": self._number(name),
                "tid": 0,
                "ts": self._microseconds(begin),
                "dur": max(0.0, round((end - begin) * 1e6, 3)),
            }
            if arguments:
                event["args"] = arguments
            self._add(event)

    def flush(self) -> None:
        """Write the recorded events to the file."""
        with self._lock:
            self._flush()

    def mark(self, name: str) -> None:
        """Record an instant event that applies to all tensors."""
        with self._lock:
            if self._file is not None:
                number = self._number("cycles")
                now = self._microseconds(time.monotonic())
                self._add({"ph": "i", "name": name, "pid": number, "tid": 0, "ts": now, "s": "g"})

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers) + 1
            self._add({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
            self._add(
                {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
            )
        return number

    def _microseconds(self, moment: float) -> float:
        return round((moment - self._start) * 1e6, 3)

    def _add(self, event: dict[str, Any]) -> None:
        self._lines.append(json.dumps(event, separators=(",", ":")))

    def _flush(self) -> None:
        if self._file is not None and self._lines:
            self._file.write(self._separator + ",\n".join(self._lines))
            self._file.flush()
            self._separator, self._lines = ",\n", []


_log = logging.getLogger("horovod")

_SHOWN = 6
"""The maximum number of names listed per rank."""


class StallInspector:
    """Checks the negotiation table for stalled tensors.

    Args:
        ranks: The members' ranks in the world.
        warn_s: The stall time after which to log a warning, or None to disable the checks.
        shutdown_s: The stall time after which the run ends, or 0 to use `limit_s`.
        limit_s: The default stall time after which the run ends.
        logs_warnings: Whether this rank logs warnings.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        warn_s: float | None,
        shutdown_s: float,
        limit_s: float,
        logs_warnings: bool,
    ) -> None:
        self._ranks, self._warn_s, self._logs_warnings = ranks, warn_s, logs_warnings
        self._shutdown_s = shutdown_s or limit_s
        if warn_s is not None and 0 < shutdown_s < warn_s:
            if logs_warnings:
                _log.warning(
                    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=%g is ignored, because it is less than "
                    "HOROVOD_STALL_CHECK_TIME_SECONDS=%g; a stall ends the run after %g s",
                    shutdown_s,
                    warn_s,
                    limit_s,
                )
            self._shutdown_s = limit_s
        self._seen: dict[str, float] = {}
        self._next_check = self._next_warning = 0.0

    def check(self, table: Mapping[str, Collection[int]], joined: Collection[int]) -> str | None:
        """Log a warning if tensors have stalled for longer than `warn_s`.

        Args:
            table: A dict that maps each tensor name to the members that have announced the tensor.
            joined: The members that have joined.

        Returns:
            The reason why the run must end, or None.
        """
        now = time.monotonic()
        if self._warn_s is None or now < self._next_check:
            return None
        self._next_check = now + min(1.0, self._warn_s / 4)
        self._seen = {name: self._seen.get(name, now) for name in table}
        late = [name for name, since in self._seen.items() if now - since > self._warn_s]
        if not late:
            return None
        ends = any(now - self._seen[name] > self._shutdown_s for name in late)
        if now < self._next_warning and not ends:
            return None
        self._next_warning = now + self._warn_s
        missing = self._missing(late, table, joined)
        text = (
            f"One or more tensors were submitted by a subset of ranks and have waited for the remaining ranks for "
            f"more than {self._warn_s:g} seconds. Different ranks may have submitted different tensors, or some ranks "
            f"may have submitted none. Either case causes a deadlock{see('one-or-more-tensors-were-submitted')}.\n"
            f"Missing ranks:\n{missing}"
        )
        if ends:
            return f"{text}\nStalled for longer than {self._shutdown_s:g} seconds: shutting down."
        if self._logs_warnings:
            _log.warning(text)
        return None

    def _missing(
        self, late: Sequence[str], table: Mapping[str, Collection[int]], joined: Collection[int]
    ) -> str:
        lines = []
        for member, rank in enumerate(self._ranks):
            names = [name for name in late if member not in table[name] and member not in joined]
            if names:
                more = [f"... {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
                lines.append(f"{rank}: [{', '.join(names[:_SHOWN] + more)}]")
        return "\n".join(lines)
