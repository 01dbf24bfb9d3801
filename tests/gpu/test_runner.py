"""Processes, deadlines and the table of `make gpu`, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import runner, table
from benchmarks.gpu.registry import Check
from benchmarks.gpu.runner import Result, run_checks

PROGRAM = """
import json, os, sys, time
device, factor, folder, *names = sys.argv[2:]
def tell(**message):
    with open(folder + "/results", "a") as file:
        file.write(json.dumps(message) + "\\n")
for name in names:
    kind = name.partition(".")[2].partition("_")[0]
    if kind == "start":
        sys.exit("cannot start")
    tell(check=name, event="begin")
    if kind == "crash":
        print("a last word", flush=True)
        os.kill(os.getpid(), 9)
    if kind == "hang":
        time.sleep(60)
    status = "skipped" if kind == "skip" else "passed"
    tell(check=name, event="end", status=status, seconds=0.5, reason="why" if kind == "skip" else "", figures={"step": [1.5, "ms"]})
"""


@pytest.fixture(autouse=True)
def _without_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a program that pretends to be the ranks: importing torch takes seconds."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    popen = runner.subprocess.Popen

    def start(arguments: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-S", str(program), *arguments[3:]], **options)

    monkeypatch.setattr(runner.subprocess, "Popen", start)


def _check(name: str, ranks: int = 1, **fields: Any) -> Check:
    values = {"on_cpu": True, "deadline_s": 0.5, "needs": ()} | fields
    return Check(f"zero.{name}", "zero", f"What {name} does.", lambda context: {}, ranks, **values)


def _status(results: list[Result]) -> dict[str, str]:
    return {result.name.removeprefix("zero."): result.status for result in results}


def test_a_crash_and_a_hang_do_not_end_the_other_checks() -> None:
    selected = [_check(name) for name in ("pass_1", "crash_1", "pass_2", "hang_1", "skip_1", "pass_3")]
    said: list[str] = []
    results = run_checks(selected, "cpu", 60, report=lambda result: said.append(result.name))
    assert _status(results) == {
        "pass_1": "passed",
        "crash_1": "failed",
        "pass_2": "passed",
        "hang_1": "failed",
        "skip_1": "skipped",
        "pass_3": "passed",
    }
    assert said == [each.name for each in selected]
    crash, hang = results[1], results[3]
    assert "status -9" in crash.reason and "a last word" in crash.error
    assert hang.reason == "the check did not finish within 0.5 s"
    assert results[0].figures == {"step": (1.5, "ms")} and results[0].seconds == 0.5


def test_processes_that_cannot_start_are_tried_once() -> None:
    results = run_checks([_check("start_1"), _check("pass_1"), _check("pass_2", ranks=2)], "cpu", 60)
    assert _status(results) == {"start_1": "failed", "pass_1": "failed", "pass_2": "passed"}
    assert "cannot start" in results[0].error and "zero.start_1 did not start" in results[1].reason


def test_checks_are_skipped_where_they_cannot_run() -> None:
    selected = [_check("pass_1", on_cpu=False), _check("pass_2", needs=("no_such_module",)), _check("pass_3")]
    results = run_checks(selected, "cpu", 60)
    assert [(result.status, result.reason) for result in results] == [
        ("skipped", "needs a GPU"),
        ("skipped", "needs no_such_module"),
        ("passed", ""),
    ]


def test_the_total_time_is_limited() -> None:
    results = run_checks([_check("hang_1", deadline_s=30.0), _check("pass_1")], "cpu", 3.0)
    assert [result.status for result in results] == ["failed", "failed"]
    assert results[0].reason == "the time limit for all checks expired"
    assert "time limit of 3 s for all checks expired" in results[1].reason


# ---- the table ----

RESULTS = [
    Result("zero.a", "What.", 2, "passed", 1.25, figures={"step": (12.3456, "ms"), "ratio": (0.5, "")}),
    Result("zero.b", "What.", 1, "failed", 3.0, "no end within 3 s", error="Traceback\nValueError: no"),
    Result("zero.c", "What.", 1, "skipped", reason="needs a GPU"),
]


def test_lines_of_the_table() -> None:
    assert table.line(RESULTS[0], 8) == "zero.a        2  passed       1.2  step 12.3 ms, ratio 0.5"
    assert table.line(RESULTS[2], 8).split() == ["zero.c", "1", "skipped", "needs", "a", "GPU"]
    assert table.failures(RESULTS) == "zero.b failed: no end within 3 s\n    Traceback\n    ValueError: no"
    assert table.summary(RESULTS) == "1 passed, 1 failed, 1 skipped"


def test_json_and_the_page(tmp_path: Path) -> None:
    text = table.dump(RESULTS, {"device": "a GPU"})
    assert table.load(text) == (RESULTS, {"device": "a GPU"})
    page, file = tmp_path / "gpu.md", tmp_path / "gpu.json"
    page.write_text("before\n<!-- gpu results -->\nold\n<!-- end -->\nafter\n")
    file.write_text(text)
    assert command.main(["report", str(file), "--page", str(page)]) == 0
    written = page.read_text()
    assert (
        "old" not in written and written.startswith("before\n") and written.endswith("<!-- end -->\nafter\n")
    )
    assert "1 passed, 1 failed, 1 skipped. Machine: device a GPU." in written
    assert "| zero.a | 2 | passed | 1.2 | step 12.3 ms, ratio 0.5 |" in written
    assert command.main(["report", str(file), "--page", str(page)]) == 0
    assert page.read_text() == written


def test_results_of_another_format_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"format": 0}))
    assert command.main(["report", str(file)]) == 2
    assert "expected results of format 1, got 0" in capsys.readouterr().err


def test_the_page_of_the_repository_has_markers() -> None:
    assert table.MARKERS.search(command.PAGE.read_text())


# ---- the command ----


def test_a_machine_without_a_gpu_ends_with_status_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_no_gpu", lambda: "torch finds no CUDA device")
    assert command.main([]) == 0
    assert capsys.readouterr().out.startswith("no GPU: torch finds no CUDA device; no checks were run")


def test_a_run_prints_the_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.environment, "build_core", lambda: None)
    monkeypatch.setattr(command, "select", lambda only: [_check("pass_1"), _check("crash_1")])
    file = tmp_path / "gpu.json"
    assert command.main(["--device", "cpu", "--json", str(file)]) == 1
    output = capsys.readouterr().out
    assert "zero.pass_1       1  passed       0.5  step 1.5 ms" in output
    assert "zero.crash_1 failed: the processes ended with exit status -9\n    a last word" in output
    assert "1 passed, 1 failed, 0 skipped on cpu" in output
    results, machine = table.load(file.read_text())
    assert _status(results) == {"pass_1": "passed", "crash_1": "failed"}
    assert machine["device"] == "cpu" and "torch" in machine


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cpu", "--only", "nothing"]) == 2
    assert "expected one of routing" in capsys.readouterr().err
    assert command.main(["--timeout", "0"]) == 2
    assert "expected seconds above 0" in capsys.readouterr().err


def test_the_list_of_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--only", "zero"]) == 0
    assert "zero.stage_3" in capsys.readouterr().out
