"""The measurement of this machine: its messages, and its end after a signal or a failure."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from farandole.bench import machine
from farandole.bench.setup import BenchError
from tests.launch.jobs import finish, start, wait_for_lines, write

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
    assert "stopped by Ctrl-C" in err
    assert "cannot measure" not in err and "Traceback" not in err


def test_a_failed_measurement_names_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "raise SystemExit(7)", "module.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "default_cache", lambda: tmp_path / "cache")
    with pytest.raises(BenchError, match="status 7; .*, or specify the speed with --flops and --bandwidth$"):
        machine.measured("module", 1, "test", instead="--flops and --bandwidth")
    assert not (tmp_path / "cache").exists()
