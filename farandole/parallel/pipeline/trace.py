"""Create the events of a trace in Chrome's Trace Event Format, for https://ui.perfetto.dev.

A trace is a list of events.  Each rank is a process of the trace, and each row of a rank is a thread.  Perfetto treats
process 0 as the idle process of Linux, so no rank is process 0.  If a thread and its process have the same number,
Perfetto treats the thread as the main thread, so these numbers always differ.  Perfetto sorts ranks and rows by name,
so rank numbers are padded with zeros; other viewers use the order given by the events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from farandole.parallel.pipeline.schedule import Backward, BackwardInput, BackwardWeight, Forward, Schedule
from farandole.parallel.pipeline.simulate import Span, Timeline

Event = dict[str, Any]

KINDS = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "input gradient",
    BackwardWeight: "weight gradient",
}
"""The name of each kind of action."""

FIRST_PROCESS = 1000
"""The number of the process of rank 0.  Perfetto shows the number after the name, as in `rank 3 1003`."""

ACTIONS = "actions"
"""The name of the row of each rank in a trace that contains only a schedule."""


def trace(timeline: Timeline, unit_s: float = 1e-3) -> list[Event]:
    """Return the events of a timeline, in which one unit of time is `unit_s` seconds."""
    events: list[Event] = []
    for rank, spans in enumerate(timeline.spans):
        events += [
            *rank_name(rank, len(timeline.spans)),
            *thread_name(rank, 0, ACTIONS),
            *action_events(timeline.schedule, spans, rank, unit_s=unit_s),
        ]
    return events


def action_events(
    schedule: Schedule,
    spans: Iterable[Span],
    rank: int,
    thread: int = 0,
    *,
    offset_s: float = 0.0,
    unit_s: float = 1.0,
) -> Iterator[Event]:
    """Yield the events of a rank's actions, named by `Schedule.label`.

    Args:
        thread: the number of the row.
        offset_s: the time in the trace that corresponds to time 0 of the spans, in seconds.
        unit_s: one unit of time of the spans, in seconds.
    """
    for span in spans:
        action = span.action
        yield duration(
            schedule.label(action),
            rank,
            thread,
            offset_s + span.start * unit_s,
            offset_s + span.end * unit_s,
            category=KINDS[type(action)],
            arguments={"stage": action.stage, "micro_batch": action.micro_batch},
        )


def duration(
    name: str,
    rank: int,
    thread: int,
    start_s: float,
    end_s: float,
    category: str = "",
    arguments: Mapping[str, Any] | None = None,
) -> Event:
    """Return the event for a time interval.

    Times are rounded to microseconds, so that intervals remain nested or disjoint.
    """
    start_us, end_us = round(start_s * 1e6), round(end_s * 1e6)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_us,
        "dur": end_us - start_us,
        "args": dict(arguments or {}),
        **_place(rank, thread),
    }


def rank_name(rank: int, ranks: int) -> list[Event]:
    """Return the events that set the name and sort position of a rank.

    Args:
        ranks: the total number of ranks.
    """
    return [
        _metadata("process_name", rank, 0, name=f"rank {rank:0{len(str(ranks - 1))}}"),
        _metadata("process_sort_index", rank, 0, sort_index=rank),
    ]


def thread_name(rank: int, thread: int, name: str) -> list[Event]:
    """Return the events that set the name and sort position of a thread of a rank."""
    return [
        _metadata("thread_name", rank, thread, name=name),
        _metadata("thread_sort_index", rank, thread, sort_index=thread),
    ]


def _metadata(kind: str, rank: int, thread: int, **arguments: Any) -> Event:
    return {"name": kind, "ph": "M", "args": arguments, **_place(rank, thread)}


def _place(rank: int, thread: int) -> Event:
    """Return the process number and the thread number of a row."""
    process = FIRST_PROCESS + rank
    return {"pid": process, "tid": 10 * process + thread}


def write_trace(events: Sequence[Event], path: Path) -> None:
    """Write `events` as JSON to the file `path`.

    Raises:
        OSError: if the file cannot be written.
    """
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
