"""The timeline: what happened to each tensor and when, as a file for Perfetto or chrome://tracing.

Each tensor is a "process" of the trace, as in Horovod's timelines: NEGOTIATE_ALLREDUCE from the request of this
rank until all ranks have asked, then ALLREDUCE, and within it MEMCPY_IN_FUSION_BUFFER, the collective and
MEMCPY_OUT_FUSION_BUFFER.

The format: "Trace Event Format", Chromium project; the JSON array form.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, TextIO


class Timeline:
    """Writes the events of one rank.  Without a file nothing is recorded, and `active` is false."""

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
        """Begin a file; OSError where it cannot be written."""
        with self._lock:
            if self._file is not None:
                raise ValueError(
                    f"a timeline is being written to {self._file.name}; hvd.stop_timeline() ends it"
                )
            self._file = open(path, "w")  # noqa: SIM115 - closed by `stop`
            self._numbers, self._lines, self._separator = {}, [], "[\n"
            self._start = time.monotonic()
            self.marks_cycles = marks_cycles
            self.active = True

    def stop(self) -> None:
        """End the file, which is valid JSON from then on.  Without effect if there is none."""
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
        """Record that an activity concerned a tensor between two times of `time.monotonic`."""
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
        """Record an instant, over the whole height of the picture."""
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
