"""What a person sees of a run: the progress line, the metrics, the curve."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest

from farandole.train.metrics import MetricsWriter, read_metrics
from farandole.train.progress import Progress, ProgressLine, minutes
from farandole.train.report import draw_loss_curve
from farandole.train.stopping import StopSignals


def test_metrics_are_lines_and_tensorboard(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=True) as metrics:
        metrics.write(1, {"loss": 5.0})
        metrics.write(2, {"loss": 4.0, "tokens_per_s": 9.0})
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == {"step": 2, "loss": 4.0, "tokens_per_s": 9.0}
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_continued_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        for step in range(1, 6):
            metrics.write(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    with MetricsWriter(tmp_path, tensorboard=False, resumed_step=3) as metrics:
        metrics.write(4, {"loss": 40.0})
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0, 40.0]


@pytest.mark.parametrize(("steps", "validated"), [(1, False), (1, True), (50, True)])
def test_a_curve_can_be_drawn_of_any_run(tmp_path: Path, steps: int, validated: bool) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        for step in range(1, steps + 1):
            metrics.write(step, {"loss": 5.0 / step})
        if validated:
            metrics.write(steps, {"validation_loss": 4.0})
    assert draw_loss_curve(tmp_path, "a run").stat().st_size > 5000


def test_without_a_terminal_progress_is_plain_lines() -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as line:
        assert not line.renews
        line.note("[brackets] stay")
        line.show(Progress(5, 100, 3.25, 12345.6, 65.0, 0.031))
    assert stream.getvalue() == (
        "[brackets] stay\nstep   5/100  loss 3.250  12,346 tokens/s  1:05 left  communication 3.1%\n"
    )


def test_on_a_terminal_progress_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with ProgressLine(stream) as line:
        assert line.renews
        line.note("[brackets] stay")
        line.show(Progress(5, 100, 3.25, 12345.6, 65.0, 0.031))
    assert "[brackets] stay\n" in stream.getvalue().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (65.4, "1:05"), (3599.6, "1:00:00"), (7384, "2:03:04")]
)
def test_minutes(seconds: float, text: str) -> None:
    assert minutes(seconds) == text


def test_the_first_signal_asks_and_a_later_ctrl_c_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # passed on by a launcher: the same key press
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == signal.SIGINT
        ended = []
        monkeypatch.setattr(StopSignals, "ONE_PRESS_S", -1.0)
        monkeypatch.setattr(signal, "raise_signal", ended.append)
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        handler(signal.SIGINT, None)
        assert ended == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
