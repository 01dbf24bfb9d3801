"""The measurement of this machine: its messages, and its end after a signal or a failure."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import farandole
from farandole.bench import machine
from farandole.bench.options import BenchError
from farandole.bench.ranks import result_of_ranks
from farandole.bench.timing import median_seconds
from tests.launch.jobs import environment, finish, start, wait_for_lines, write

MEASURE = """
from farandole.bench.machine import measured
measured("module", 1, "test", instead="--flops and --bandwidth")
"""


def test_an_interrupted_measurement_ends_at_once(tmp_path: Path) -> None:
    """The exit status is that of other interrupted commands, even if a rank ignores the signal."""
    module = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', file=open('ready', 'w'))"
    write(tmp_path, f"{module}\ntime.sleep(60)", "module.py")
    job = start([sys.executable, write(tmp_path, MEASURE)], tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    wait_for_lines(tmp_path / "ready", 1)
    began = time.monotonic()
    os.kill(job.pid, signal.SIGINT)
    status, _, err = finish(job)
    assert status == 130, err
    assert time.monotonic() - began < 10
    lines = [line for line in err.splitlines() if line]
    cache = tmp_path / "cache" / "farandole" / "machines"
    assert lines[0].startswith(f"measuring the speed of this machine (once; stored in {cache}")
    assert lines[0].endswith("; skip this with --flops and --bandwidth)")
    assert len(lines) == 2, err  # no line describes the placement of the ranks
    assert "stopped by Ctrl-C" in err
    assert "cannot measure" not in err and "Traceback" not in err


def test_a_failed_measurement_names_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "raise SystemExit(7)", "module.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "default_cache", lambda: tmp_path / "cache")
    with pytest.raises(BenchError, match="status 7; .*, or specify the speed with --flops and --bandwidth$"):
        machine.measured("module", 1, "test", instead="--flops and --bandwidth")
    assert not (tmp_path / "cache").exists()


def _time_calls(rank: int, size: int) -> tuple[list[int], list[float]]:
    """Time fast and slow calls; return the number of calls of each kind, and the medians."""
    runtime = farandole.init()
    counts, medians = [], []
    for wait_s, limit_s in ((0.0, 60.0), (0.05 * rank, 0.12), (1.0, 0.5)):
        calls: list[int] = []

        def call(wait_s: float = wait_s, calls: list[int] = calls) -> None:
            calls.append(1)
            time.sleep(wait_s)

        medians.append(median_seconds(call, runtime, 4, limit_s))
        counts.append(len(calls))
    return counts, medians


def test_slow_calls_are_repeated_less_often(ranks: Any) -> None:
    """All ranks make the same number of calls, although only one rank is slow."""
    (counts, _), (others, medians) = ranks(2).run(_time_calls)
    assert counts == others
    assert counts[0] == 5 and 1 <= counts[1] <= 3 and counts[2] == 1
    assert medians[1] >= 0.05 and medians[2] >= 1


STALL = """
import sys, time
from farandole.bench.timing import measuring_rank
with measuring_rank() as runtime:
    time.sleep(6 * runtime.rank)
    runtime.comm.barrier()
open(sys.argv[1], "w").write("{}")
"""


def test_ranks_that_measure_log_no_stall_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, STALL, "stalling.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    assert result_of_ranks("stalling", str, ranks=2, failure="cannot measure", quiet=True) == "{}"
    assert capfd.readouterr().err == ""
