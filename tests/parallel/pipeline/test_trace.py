"""The trace of a schedule keeps the rules of the viewers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from farandole.parallel.pipeline.schedule import build
from farandole.parallel.pipeline.simulate import simulate
from farandole.parallel.pipeline.trace import Event, trace, write_trace

STAGES, MICRO_BATCHES = 4, 8


def check_trace(path: Path) -> dict[tuple[int, int], list[Event]]:
    """Check a trace against the Trace Event Format; return the intervals of each thread.

    The format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    found = json.loads(path.read_text())
    assert found["displayTimeUnit"] in ("ms", "ns")
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    named: dict[tuple[str, int, int], Event] = {}
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        # Perfetto treats process 0 and main threads differently
        assert event["pid"] > 0 and event["tid"] not in (0, event["pid"])
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            kind = (event["name"], *place)
            assert kind not in named
            named[kind] = event["args"]
            continue
        assert event["ph"] == "X"
        assert isinstance(event["ts"], int) and isinstance(event["dur"], int)
        assert event["ts"] >= 0 and event["dur"] >= 0
        rows[place].append(event)
    for process, thread in rows:
        assert named["thread_name", process, thread]["name"]
        assert isinstance(named["thread_sort_index", process, thread]["sort_index"], int)
        assert sum(kind == "process_name" and p == process for kind, p, _ in named) == 1
        assert sum(kind == "process_sort_index" and p == process for kind, p, _ in named) == 1
    for events in rows.values():
        _check_nested(events)
    return rows


def _check_nested(events: list[Event]) -> None:
    """Check that two intervals of a thread are disjoint, or one contains the other; viewers drop other intervals."""
    ends: list[int] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1], event
        ends.append(end)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "gems-w", "chimera"])
def test_a_trace_of_a_schedule_keeps_the_format(name: str, tmp_path: Path) -> None:
    schedule = build(name, STAGES, MICRO_BATCHES)
    write_trace(trace(simulate(schedule)), tmp_path / "trace.json")
    rows = check_trace(tmp_path / "trace.json")
    assert [len(events) for events in rows.values()] == [len(actions) for actions in schedule.actions]


def test_the_names_of_ranks_sort_by_rank():
    """Perfetto sorts the ranks by name."""
    events = trace(simulate(build("1f1b", 12, MICRO_BATCHES)))
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == sorted(names) and len(set(names)) == 12
