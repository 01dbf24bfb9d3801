"""Write a run's output: progress, metrics and the final report.  Only rank 0's observer writes."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from farandole.comm.notices import warn
from farandole.data.wording import counted, disk_failure, short, size
from farandole.launch.runtime import Runtime
from farandole.memory.disk import Budget, OffloadError
from farandole.memory.offload_store import measure_bandwidth
from farandole.memory.swap import THRESHOLD_BYTES
from farandole.parallel.pipeline.trace import Event, write_trace
from farandole.plan import Place
from farandole.train.config import TrainConfig
from farandole.train.hardware import PrecisionChoice, peak_memory
from farandole.train.metrics import MetricsWriter, draw_loss_curve
from farandole.train.run_folder import TRACE, DiskError
from farandole.train.trainer import StepResult, Trainer


@dataclass(frozen=True)
class Progress:
    """A run's progress.

    Args:
        speed: the throughput of all ranks together, in `unit` per second.
        left_s: the estimated remaining time, in seconds.
        waiting: the fraction of time spent waiting for communication.
    """

    step: int
    steps: int
    loss: float
    speed: float
    left_s: float
    waiting: float
    unit: str = "tokens"

    def __str__(self) -> str:
        return "  ".join(self._parts())

    def fit(self, width: int) -> str:
        """Return the progress as text of at most `width` characters, omitting the last values if necessary."""
        parts = self._parts()
        while len(parts) > 1 and len("  ".join(parts)) > width:
            parts.pop()
        return "  ".join(parts)[:width]

    def _parts(self) -> list[str]:
        return [
            f"step {self.step:>{len(str(self.steps))}}/{self.steps}",
            f"loss {self.loss:.3f}",
            f"{self.speed:,.0f} {self.unit}/s",
            f"{minutes(self.left_s)} left",
            f"communication {self.waiting:.1%}",
        ]


class _ProgressStream:
    """A text stream that logs a warning at the first failed write and then discards all output."""

    def __init__(self, stream: TextIO | None) -> None:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a sample can contain any character
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        self._attempt(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def _attempt(self, action: Callable[[TextIO], object]) -> None:
        if self._stream is None:
            return
        try:
            action(self._stream)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._stream = None
            warn(
                f"cannot print the progress: {error}; training continues, and the metrics are written to files"
            )


_LONGEST_BAR, _SHORTEST_BAR = 24, 6


class ProgressLine:
    """Shows `Progress`, and prints notes.

    On a terminal, notes appear above the progress line, and `show` is fast enough to call in every step.  If `stream`
    cannot be written, the output is discarded.  `stream` is standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        output = _ProgressStream(stream or sys.stdout)  # sys.stdout is None if its descriptor was closed
        self.is_live = output.isatty()
        self._console = Console(
            file=cast(TextIO, output), highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._live: Live | None = None
        if self.is_live:
            self._live = Live(console=self._console, refresh_per_second=5, transient=True)

    def show(self, progress: Progress) -> None:
        """On a terminal, update the progress line; otherwise, print the progress on a new line."""
        if self._live is None:
            self._console.print(str(progress))
            return
        width = self._console.width
        text = progress.fit(width)
        bar = min(_LONGEST_BAR, width - len(text) - 1)
        row = Table.grid(padding=(0, 1))
        if bar >= _SHORTEST_BAR:
            row.add_row(ProgressBar(progress.steps, progress.step, width=bar), text)
        else:
            row.add_row(text)
        self._live.update(row)

    def note(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text)

    def __enter__(self) -> ProgressLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def minutes(seconds: float) -> str:
    """Format a duration as minutes and seconds (1:05), or as hours, minutes and seconds (2:03:04)."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    short = f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else short


_RECENT = 20
"""The number of steps over which speed and waiting time are averaged."""


class Observer:
    """Prints and records the training progress.

    Args:
        earlier_s: the run's duration in seconds before it was resumed.
        limit: the matrix-multiplication throughput of all ranks together, in FLOP/s; 0 if unknown.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Path,
        trainer: Trainer,
        choice: PrecisionChoice,
        runtime: Runtime,
        earlier_s: float,
        limit: float = 0.0,
    ) -> None:
        self._config = config
        self._run = run
        self._trainer, self._task = trainer, trainer.task
        self._runtime = runtime
        self._choice = choice
        self._limit = limit
        self._flops = trainer.flops if limit else None
        self._resumed = trainer.step_number or None
        self._earlier_s = self._saved_s = earlier_s
        self._started = time.monotonic()
        self._recent: deque[tuple[float, StepResult]] = deque(maxlen=_RECENT)
        self._active = runtime.rank == 0
        self._ranks = counted(runtime.size, "rank")
        self._line = ProgressLine()
        self._metrics: MetricsWriter | None = None

    @property
    def elapsed_s(self) -> float:
        """Return the run's duration in seconds, including the time before it was resumed."""
        return self._earlier_s + time.monotonic() - self._started

    def __enter__(self) -> Observer:
        if self._active:
            self._metrics = MetricsWriter(
                self._run,
                tensorboard=self._config.log.tensorboard,
                wandb=self._config.log.wandb,
                config=self._config.flat(),
                resumed_step=self._resumed,
            )
            self._line.__enter__()
            self._introduce()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            self._line.__exit__(kind, error, trace)
        if self._metrics is not None:
            self._metrics.close(failed=error is not None)

    def stepped(self, result: StepResult, seconds: float) -> None:
        """Print and record the result of a step that took `seconds`."""
        if self._metrics is None:
            return
        self._recent.append((seconds, result))
        step, total = self._trainer.step_number, sum(s for s, _ in self._recent)
        speed = len(self._recent) * self._config.batch * self._task.units_per_sample / total
        waiting = sum(recent.waited_s for _, recent in self._recent) / total
        self._metrics.write(
            step,
            {
                "loss": result.loss,
                "learning_rate": result.learning_rate,
                "gradient_norm": result.gradient_norm,
                f"{self._task.unit}_per_s": speed,
                "waiting_share": waiting,
                "memory_bytes": peak_memory(self._trainer.device),
                "elapsed_s": self.elapsed_s,
            }
            | _router_metrics(result)
            | self._utilization(total)
            | ({"loss_scale": self._trainer.scaler.scale} if self._trainer.scaler.enabled else {}),
            {"overflow": str(result.overflow)} if result.skipped else None,
        )
        if result.skipped and self._trainer.scaler.is_reported:
            self._line.note(str(result.overflow))
            if self._trainer.scaler.advice:
                self._line.note(self._trainer.scaler.advice)
        if self._line.is_live or step % self._config.log.every == 0 or step == self._config.steps:
            left_s = (self._config.steps - step) * total / len(self._recent)
            self._line.show(
                Progress(step, self._config.steps, result.loss, speed, left_s, waiting, self._task.unit)
            )

    def _utilization(self, seconds: float) -> dict[str, float]:
        """Return the model FLOP/s utilization of the recent steps, which took `seconds` in total."""
        if self._flops is None:
            return {}
        samples = len(self._recent) * self._config.batch
        targets = sum(recent.count for _, recent in self._recent)
        return {
            "model_flops_utilization": self._flops.of(self._task.lengths, samples, targets)
            / (seconds * self._limit)
        }

    def evaluated(self, found: Mapping[str, float]) -> None:
        """Print and record the current step's validation loss and other metrics."""
        if self._metrics is not None:
            step = self._trainer.step_number
            self._metrics.write(step, {f"validation_{name}": value for name, value in found.items()})
            self._line.note(
                f"step {step}: " + ", ".join(f"validation {n} {value:.3f}" for n, value in found.items())
            )

    def sampled(self, report: str) -> None:
        """Print and record the task's report about the model after the current step."""
        if self._metrics is not None and report:
            self._metrics.write_sample(self._trainer.step_number, report)
            self._line.note(f"step {self._trainer.step_number}:\n{report}\n")

    def saved(self, folder: Path) -> None:
        """Report that the current state is saved in checkpoint `folder`."""
        self._saved_s = self.elapsed_s
        if self._active:
            self._line.note(f"saved {folder}")

    def profiled(self, events: Sequence[Event]) -> None:
        """Write the trace of the first steps, and print its path."""
        if not self._active:
            return
        path = self._run / TRACE
        if not events:
            self._line.note(
                f"no {TRACE} was written: profile=true starts recording at the second step, but the job ended before "
                "that step"
            )
            return
        try:
            write_trace(events, path)
            self._line.note(
                f"trace of the first steps on {self._ranks}: {path} (open it in https://ui.perfetto.dev)"
            )
        except OSError as error:  # training continues
            self._line.note(f"cannot write {path}: {disk_failure(error, self._run)}")

    def finished(self, report: str, model: Path | None = None) -> None:
        """Plot the loss curve, write the task's report, and print the paths of the results."""
        if self._metrics is None:
            return
        if model is not None:
            self._line.note(f"trained model, for farandole and transformers: {model}")
        title = f"{self._config.name}: {short(self._trainer.parameters)} parameters, {self._ranks}"
        done = f"{counted(self._config.steps, 'step')} in {minutes(self._saved_s)} on {self._ranks}"
        if report:
            self._line.note(f"\n{report}\n")
        sample = self._run / "sample.txt"
        try:
            curve = draw_loss_curve(self._run, title, f"loss per {self._task.unit.removesuffix('s')}")
            if report:
                self._metrics.write_sample(self._trainer.step_number, report)
                sample.write_text(report, encoding="utf-8")
            self._line.note(f"{done}; loss curve {curve}" + (f", sample {sample}" if report else ""))
        except (OSError, DiskError) as error:  # the checkpoint is already saved
            why = disk_failure(error, self._run) if isinstance(error, OSError) else error
            self._line.note(f"{done}; cannot write the loss curve and the sample: {why}")

    def _introduce(self) -> None:
        task, config = self._task, self._config
        samples = (
            f"{config.batch} x {task.units_per_sample}" if task.units_per_sample > 1 else str(config.batch)
        )
        self._line.note(f"run {self._run}")
        self._line.note(
            f"model {short(self._trainer.parameters)} parameters, batch {samples} {task.unit} on {self._ranks}"
        )
        self._line.note(f"precision {self._choice.name} ({self._choice.reason})")
        for note in _memory_summary(self._trainer, self._runtime.local_size):
            self._line.note(note)
        if self._resumed:
            self._line.note(f"resuming after step {self._resumed}")


def _router_metrics(result: StepResult) -> dict[str, float]:
    """Return each router's load imbalance, fraction of dropped tokens, and fraction of the load per expert."""
    return {
        f"{name}/{metric}": value
        for name, load in result.loads.items()
        for metric, value in (
            [("imbalance", load.imbalance), ("dropped", load.dropped)]
            + [
                (f"load/{number}", share)
                for number, share in enumerate((load.tokens / load.tokens.sum()).tolist())
            ]
        )
    }


def _memory_summary(trainer: Trainer, ranks: int) -> Iterator[str]:
    """Yield lines that describe recomputation, swapping and offload.  Measuring a disk's bandwidth takes about 1 s."""
    plan = trainer.config.plan
    yield from trainer.notices
    if plan.swap != "none":
        where = Place.parse(plan.swap).folder or "host memory"
        yield f"activations of {size(THRESHOLD_BYTES)} or more are swapped to {where}"
    folder = Place.parse(plan.offload).folder
    for update in trainer.engine.offloaded:
        budget = update.state.budget()
        if not folder:
            yield f"optimizer states in {update.state.stream.access}"
            continue
        try:
            bandwidth = measure_bandwidth(folder)
        except OffloadError as error:  # the states may fill the disk
            yield f"optimizer states on the disk of {folder}; cannot measure its speed: {error}"
            continue
        yield f"optimizer states on the disk: {Budget(budget.read_bytes * ranks, budget.written_bytes * ranks, bandwidth)}"
