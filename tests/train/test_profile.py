"""`farandole train profile=true`: the trace of the first steps of all ranks."""

from __future__ import annotations

import contextlib
import io
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from farandole.mesh import Mesh
from farandole.parallel.pipeline.schedule import build
from farandole.parallel.pipeline.trace import Event
from farandole.train.profile import STEPS, THREADS, pipelines
from tests.parallel.pipeline.test_trace import check_trace
from tests.train.small import overrides, train_here

PHASES, MEASURED, SIMULATED = THREADS

Rows = dict[tuple[str, str], list[Event]]
"""The intervals of each thread by start; the key has the names of the process and the thread."""

SHORT = ["profile=true", "sample.tokens=0", "log.tensorboard=false", "checkpoint.every=2", "evaluate.every=3"]


def _output(rank: int, size: int, words: list[str], run: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        train_here(rank, size, ["tiny", *SHORT, *words], run)
    return output.getvalue()


def _rows(run: Path) -> Rows:
    check_trace(run / "trace.json")
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert 0 not in processes  # is special in Perfetto
    rows: Rows = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda event: event["ts"]):
        rows[processes[event["pid"]], threads[event["pid"], event["tid"]]].append(event)
    return rows


def _end(event: Event) -> int:
    end: int = event["ts"] + event["dur"]
    return end


def _check_phases(events: list[Event], first: int, last: int) -> None:
    steps = [event for event in events if event["name"].startswith("step ")]
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(first, last + 1)]
    for step in steps:
        within = [e for e in events if step["ts"] <= e["ts"] and _end(e) <= _end(step) and e is not step]
        names = [event["name"] for event in within]
        assert names[:2] == ["data", "forward and backward"]
        assert names[-1] == "optimizer"
        (wait,) = (event for event in within if event["name"] == "wait for gradients")
        assert within[1]["ts"] <= wait["ts"] and _end(wait) <= _end(within[1])
    between = [event["name"] for event in events if event["name"] in ("evaluation", "checkpoint")]
    assert between.count("evaluation") == sum(step % 3 == 0 for step in range(first, last + 1))
    assert "checkpoint" in between


def test_a_trace_has_the_phases_of_all_ranks_on_one_clock(ranks: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    outputs = ranks(2).run(_output, [*overrides(tmp_path), "steps=8"], run)
    assert (
        f"trace of the first steps on 2 ranks: {run / 'trace.json'} (open it in https://ui.perfetto.dev)"
        in outputs[0]
    )
    assert "trace" not in outputs[1]
    rows = _rows(run)
    assert set(rows) == {("rank 0", PHASES), ("rank 1", PHASES)}
    assert min(event["ts"] for events in rows.values() for event in events) == 0
    for events in rows.values():
        _check_phases(events, 2, 1 + STEPS)
    waits = [[e for e in events if e["name"] == "wait for gradients"] for events in rows.values()]
    for first, second in zip(*waits, strict=True):  # both ranks wait until both have computed
        assert max(first["ts"], second["ts"]) <= min(_end(first), _end(second))


@pytest.mark.parametrize("schedule", ["1f1b", "gems"])
def test_a_trace_shows_measured_and_simulated_actions(ranks: Any, tmp_path: Path, schedule: str) -> None:
    """Measured actions have the order of the schedule, and a forward pass starts after the one that it needs."""
    words = [*overrides(tmp_path), "steps=3", "plan.pipeline=2", f"plan.schedule={schedule}"]
    ranks(2).run(_output, [*words, "plan.micro_batches=4", "model.width=128"], tmp_path / "run")
    rows = _rows(tmp_path / "run")
    expected = build(schedule, 2, 4)
    assert set(rows) == {(f"rank {rank}", thread) for rank in range(2) for thread in THREADS}
    forward: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for rank in range(2):
        phases = rows[f"rank {rank}", PHASES]
        _check_phases(phases, 2, 3)
        own = [(action.code, action.stage, action.micro_batch) for action in expected.actions[rank]]
        for thread in (MEASURED, SIMULATED):
            events = rows[f"rank {rank}", thread]
            found = [(e["name"][0].upper(), e["args"]["stage"], e["args"]["micro_batch"]) for e in events]
            assert found == own * 2  # steps 2 and 3
        for event in rows[f"rank {rank}", MEASURED]:
            if event["cat"] == "forward":
                forward[event["args"]["stage"], event["args"]["micro_batch"]].append(event)
            assert any(_contains(phase, event) for phase in phases)
    gaps = [
        later["ts"] - _end(earlier)
        for m in range(4)
        for earlier, later in zip(forward[0, m], forward[1, m], strict=True)
    ]
    assert len(gaps) == 8
    assert (
        statistics.median(gaps) >= 0
    )  # a rank can be interrupted between sending its output and the end of the action


def _contains(phase: Event, event: Event) -> bool:
    return bool(
        phase["name"] == "forward and backward" and phase["ts"] <= event["ts"] and _end(event) <= _end(phase)
    )


def test_a_job_without_a_second_step_says_that_it_has_no_trace(ranks: Any, tmp_path: Path) -> None:
    (output,) = ranks(1).run(_output, [*overrides(tmp_path), "steps=1"], tmp_path / "run")
    assert "no trace.json was written: profile=true starts recording at the second step" in output
    assert not (tmp_path / "run" / "trace.json").exists()


def test_pipelines_are_found_in_the_mesh() -> None:
    assert pipelines(Mesh.box(8, data=2, pipeline=2, tensor=2)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert pipelines(Mesh.box(4, data=2, pipeline=2, mirror=2)) == [(0, 1), (2, 3)]
