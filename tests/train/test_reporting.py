"""The output of a run: progress line, metrics, loss curve and signals."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from farandole.train.config import ConfigError
from farandole.train.metrics import MetricsWriter, _smooth, draw_loss_curve, read_metrics
from farandole.train.observer import Progress, ProgressLine, minutes
from farandole.train.run import StopSignals
from farandole.train.run_folder import DiskError
from farandole.train.start import check_wandb
from tests.forked_python import ForkedPython
from tests.train.command import ROOT, Command
from tests.train.small import overrides

FULL = Path("/dev/full")


def _tensorboard_losses(run: Path) -> list[tuple[int, float]]:
    """Return steps and losses as read by TensorBoard."""
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_metrics_are_written_as_json_lines_and_for_tensorboard(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path, tensorboard=True)
    metrics.write(1, {"loss": 5.0})
    metrics.write(2, {"loss": 4.0, "tokens_per_s": 9.0})
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == {"step": 2, "loss": 4.0, "tokens_per_s": 9.0}
    assert _tensorboard_losses(tmp_path) == [(1, 5.0), (2, 4.0)]


def test_resumed_run_deletes_later_metrics(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path, tensorboard=True)
    for step in range(1, 6):
        metrics.write(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.rename(events.with_name("events.out.tfevents.1"))  # as if written earlier by another process
    MetricsWriter(tmp_path, tensorboard=True, resumed_step=3).write(4, {"loss": 40.0})
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0, 40.0]
    assert _tensorboard_losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, a file on a disk that is always full")
def test_full_disk_disables_tensorboard_but_ends_the_run_for_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = MetricsWriter(tmp_path, tensorboard=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.unlink()
    events.symlink_to(FULL)
    for step in range(3):
        metrics.write(step, {"loss": 5.0})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    (message,) = caplog.messages
    assert message.startswith("farandole: cannot write TensorBoard files: no space left on the disk (")

    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(FULL)
    with pytest.raises(
        DiskError, match=r"cannot write .*metrics.jsonl: no space left on the disk \(.* free\)"
    ):
        metrics.write(3, {"loss": 5.0})


def test_smoothed_curve_does_not_lag() -> None:
    falling = [(float(step), 100.0 - step) for step in range(90)]
    assert [value for _, value in _smooth(falling)[:87]] == pytest.approx(
        [value for _, value in falling[:87]]
    )
    assert _smooth([(1.0, 2.0)]) == [(1.0, 2.0)]
    noise = [(float(step), float(step % 2)) for step in range(900)]
    assert all(abs(value - 0.5) < 0.05 for _, value in _smooth(noise)[30:])


@pytest.mark.parametrize(("steps", "validated"), [(1, False), (1, True), (50, True)])
def test_loss_curve_of_short_and_long_runs(tmp_path: Path, steps: int, validated: bool) -> None:
    metrics = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(1, steps + 1):
        metrics.write(step, {"loss": 5.0 / step})
    if validated:
        metrics.write(steps, {"validation_loss": 4.0})
    assert draw_loss_curve(tmp_path, "a run").stat().st_size > 5000


def test_loss_curve_without_finite_losses(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path, tensorboard=False)
    metrics.write(1, {"loss": float("inf")})
    metrics.write(1, {"validation_loss": float("nan")})
    assert draw_loss_curve(tmp_path, "a run").stat().st_size > 5000
    metrics.write(1, {"validation_loss": 4.0})
    assert draw_loss_curve(tmp_path, "a run").stat().st_size > 5000


def test_progress_is_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as line:
        assert not line.is_live
        line.note("[brackets] stay")
        line.show(Progress(5, 100, 3.25, 12345.6, 65.0, 0.031))
    assert stream.getvalue() == (
        "[brackets] stay\nstep   5/100  loss 3.250  12,346 tokens/s  1:05 left  communication 3.1%\n"
    )


def test_progress_is_one_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with ProgressLine(stream) as line:
        assert line.is_live
        line.note("[brackets] stay")
        line.show(Progress(5, 100, 3.25, 12345.6, 65.0, 0.031))
    shown = stream.getvalue().replace("\r\n", "\n")
    assert "[brackets] stay\n" in shown
    assert "━ step   5/100  loss 3.250  12,346 tokens/s  1:05 left  communication 3.1%" in re.sub(
        r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown
    )


def _closed_pipe() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return open(write, "w")


@pytest.mark.parametrize("open_stream", [_closed_pipe, lambda: FULL.open("w")])
def test_failed_output_is_reported_once_and_discarded(
    open_stream: Callable[[], TextIO], caplog: pytest.LogCaptureFixture
) -> None:
    if not FULL.exists():
        pytest.skip("needs /dev/full, a file on a disk that is always full")
    stream = open_stream()
    with ProgressLine(stream) as line:
        for step in range(1, 4):
            line.note("a note")
            line.show(Progress(step, 100, 3.25, 12345.6, 65.0, 0.031))
    (message,) = caplog.messages
    assert message.startswith("farandole: cannot print the progress: [Errno ")
    assert message.endswith("; training continues, and the metrics are written to files")
    with suppress(OSError):
        stream.close()


def test_closed_output_is_discarded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    ProgressLine().note("a note")
    assert not caplog.messages
    stream = io.StringIO()
    line = ProgressLine(stream)
    stream.close()
    line.note("a note")
    assert len(caplog.messages) == 1


def test_characters_outside_the_encoding_are_escaped() -> None:
    written = io.BytesIO()
    with ProgressLine(io.TextIOWrapper(written, "ascii")) as line:
        line.note("caf\u00e9 \ufffd")
    assert written.getvalue() == b"caf\\xe9 \\ufffd\n"


def _fill_stdout() -> None:
    os.dup2(os.open(FULL, os.O_WRONLY), 1)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, a file on a disk that is always full")
def test_training_continues_if_standard_output_is_full(tmp_path: Path) -> None:
    words = [*overrides(tmp_path), "steps=3", "plan.precision=fp32", "log.tensorboard=false", "-n", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = ["-m", "farandole", "train", "tiny", *words]
    process = ForkedPython(command, environment, tmp_path, enter=_fill_stdout, fork_ranks=True)
    _, errors = process.communicate(100)
    assert process.returncode == 0, errors
    assert errors.count("cannot print the progress") == 1
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "loss.png").exists()


def test_narrow_terminals_omit_the_last_parts() -> None:
    progress = Progress(5, 100, 3.25, 12345.6, 65.0, 0.031)
    assert progress.fit(100) == str(progress)
    assert progress.fit(60) == "step   5/100  loss 3.250  12,346 tokens/s  1:05 left"
    assert progress.fit(30) == "step   5/100  loss 3.250"
    assert progress.fit(8) == "step   5"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (65.4, "1:05"), (3599.6, "1:00:00"), (7384, "2:03:04")]
)
def test_minutes(seconds: float, text: str) -> None:
    assert minutes(seconds) == text


def test_first_signal_requests_a_stop_and_later_ctrl_c_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same key press, forwarded by a launcher
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == signal.SIGINT
        ended = []
        monkeypatch.setattr(StopSignals, "DEBOUNCE_S", -1.0)
        monkeypatch.setattr(signal, "raise_signal", ended.append)
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        handler(signal.SIGINT, None)
        assert ended == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested
            signal.raise_signal(signal.SIGTERM)
            assert stop.received == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


WANDB = """
import json

class _Run:
    def log(self, record, step):
        _write("log", step, record)

    def finish(self, exit_code):
        _write("finish", exit_code)

def init(**options):
    _write("init", options["name"], options["config"]["steps"])
    return _Run()

def _write(*values):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(values) + "\\n")
"""
"""A module with the functions of Weights & Biases that a run calls, which records the calls."""


@pytest.mark.parametrize("diverges", [False, True])
def test_run_is_logged_to_weights_and_biases_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, diverges: bool
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = overrides(tmp_path)
    (tmp_path / "wandb.py").write_text(WANDB)
    rate = ["optimizer.learning_rate=1e30", "optimizer.clip=1e30", "steps=9"] * diverges
    command = Command(
        tmp_path,
        "train",
        "tiny",
        *words,
        "steps=3",
        "log.wandb=true",
        "plan.precision=fp32",
        "-n",
        "2",
        *rate,
    )
    assert command.end() == (1 if diverges else 0), command.output
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    (run,) = (tmp_path / "runs").iterdir()
    assert calls[0] == ["init", run.name, 9 if diverges else 3]
    assert calls[-1] == ["finish", int(diverges)]
    assert [call[0] for call in calls].count("finish") == 1
    logged = [(step, record["loss"]) for what, step, record in calls[1:-1] if "loss" in record]
    expected = [(r["step"], r["loss"]) for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
    assert logged == expected


def test_weights_and_biases_is_checked_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="log.wandb=true requires Weights & Biases: pip install wandb"):
        check_wandb()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"requires a login to api.wandb.ai: run wandb login, .*offline"):
        check_wandb()
    (tmp_path / "netrc").write_text("machine wandb.example.com login user password secret\n")
    with pytest.raises(ConfigError, match=r"requires a login to api.wandb.ai"):
        check_wandb()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    check_wandb()
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_wandb()
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check_wandb()
