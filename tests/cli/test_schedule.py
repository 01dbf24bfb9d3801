"""`farandole schedule`: lists, simulates, draws and searches schedules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from farandole.cli.main import app
from farandole.parallel.pipeline.schedule import registered


def _schedule(*words: str) -> Result:
    return CliRunner().invoke(app, ["schedule", *words], prog_name="farandole")


def test_the_list_has_a_line_per_schedule():
    result = _schedule("--stages", "4", "--micro-batches", "16")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.output.splitlines() if line}
    for each in registered():
        assert each.summary[:60] in rows[each.name]
    assert re.search(r"1f1b +15\.8 % +4 +1x", result.output)
    assert re.search(r"gems-w +51\.5 % +1 +2x", result.output)


def test_schedules_that_need_other_sizes_say_so_in_the_list():
    result = _schedule("--stages", "3")
    assert "chimera needs an even number of ranks, got 3; nearest: 4 ranks, or gems" in result.output


def test_a_timeline_is_printed():
    result = _schedule("gpipe", "--stages", "2", "--micro-batches", "2")
    assert "gpipe: makespan 9, idle 33.3 %, peak activations 2" in result.output
    assert "rank 0 F0F1. . . B0--B1--" in result.output
    assert "rank 1 . F0F1B0--B1--" in result.output


@pytest.mark.parametrize("suffix", [".png", ".svg", ".json"])
def test_timelines_are_drawn(tmp_path: Path, suffix: str):
    file = tmp_path / f"gems{suffix}"
    result = _schedule("gems", "--stages", "4", "--micro-batches", "8", "--draw", str(file))
    assert result.exit_code == 0
    assert f"wrote {file}" in result.output
    if suffix == ".png":
        with Image.open(file) as image:
            assert image.width > 1000
    elif suffix == ".svg":
        assert "<svg" in file.read_text()
    else:
        events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
        assert len(events) == 2 * 4 * 8
        assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(75_000)


def test_draw_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert _schedule("1f1b", "--draw", "--stages", "2").exit_code == 0
    assert (tmp_path / "schedule.png").exists()


def test_the_search_finds_a_schedule_that_fits():
    result = _schedule("--search", "--stages", "3", "--micro-batches", "6", "--memory", "2")
    assert result.exit_code == 0
    assert re.search(
        r"best schedule found: .+\nmakespan \S+, idle \S+ %, peak activations (2|1\.5|1)\b", result.output
    )
    assert re.search(r"gpipe .* does not fit", result.output)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gem",), "unknown schedule 'gem'; did you mean gems?"),
        (("1f1b", "--parts", "2"), "--parts applies only to gems, gems-master, gems-w; omit --parts"),
        (("chimera", "--stages", "3"), "chimera needs an even number of ranks, got 3"),
        (("1f1b", "--draw", "x.gif"), "x.gif: expected a name that ends in .png, .svg, .pdf or .json"),
        (("--draw", "x.json"), "x.json: a trace contains one schedule, got 14"),
        (("1f1b", "--memory", "2"), "--memory requires --search"),
        (("1f1b", "--search"), "--search compares all schedules and does not support schedule names"),
        (("1f1b", "--stage-input", "2"), "--stage-input requires --recompute"),
        (("--search", "--memory", "0.1"), "fits in memory=0.1; the known schedules need memory=1 or more"),
        (("1f1b", "--forward", "1,x"), "--forward 1,x: expected a number of at least 0, or one such number per stage"),
        (("1f1b", "--forward", "1,2"), "expected one cost for each of the 4 stages of 1f1b, got 2"),
        (("1f1b", "--stage", "2"), "unknown option --stage; did you mean --stages?"),
    ],
)  # fmt: skip
def test_mistakes_are_answered(words, message):
    result = _schedule(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
