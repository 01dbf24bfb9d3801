"""What the person sees and keeps of a run: progress, metrics, and the report at the end.

Only rank 0's observer does anything.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from types import TracebackType

from tokenizers import Tokenizer

from farandole.data.wording import counted, short
from farandole.launch.runtime import Runtime
from farandole.train.config import TrainConfig
from farandole.train.disk import reason
from farandole.train.engine import Engine, StepResult
from farandole.train.memory_notes import memory_notes
from farandole.train.metrics import MetricsWriter
from farandole.train.precision import Choice
from farandole.train.progress import Progress, ProgressLine, minutes

_RECENT = 20
"""Steps over which speed and the share of waiting are averaged."""


class Observer:
    """Watches `engine` train.  `earlier_s` is how long the run took before it was continued."""

    def __init__(
        self,
        config: TrainConfig,
        run: Path,
        engine: Engine,
        choice: Choice,
        runtime: Runtime,
        earlier_s: float,
    ) -> None:
        self._config = config
        self._run = run
        self._engine = engine
        self._runtime = runtime
        self._choice = choice
        self._resumed = engine.step_number or None
        self._earlier_s = earlier_s
        self._started = time.monotonic()
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._active = runtime.rank == 0
        self._ranks = counted(runtime.size, "rank")
        self._line = ProgressLine()
        self._metrics: MetricsWriter | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has taken, before and after being continued."""
        return self._earlier_s + time.monotonic() - self._started

    def __enter__(self) -> Observer:
        if self._active:
            self._metrics = MetricsWriter(
                self._run, tensorboard=self._config.log.tensorboard, resumed_step=self._resumed
            )
            self._line.__enter__()
            self._introduce()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            self._line.__exit__(kind, error, trace)

    def stepped(self, result: StepResult, seconds: float) -> None:
        """A step took `seconds` and gave `result`."""
        if self._metrics is None:
            return
        self._recent.append((seconds, result.waited_s))
        step, total = self._engine.step_number, sum(s for s, _ in self._recent)
        speed = len(self._recent) * self._config.tokens_per_step / total
        waiting = sum(w for _, w in self._recent) / total
        self._metrics.write(
            step,
            {
                "loss": result.loss,
                "learning_rate": result.learning_rate,
                "gradient_norm": result.gradient_norm,
                "tokens_per_s": speed,
                "waiting_share": waiting,
                "elapsed_s": self.elapsed_s,
            }
            | ({"loss_scale": self._engine.scaler.scale} if self._engine.scaler.enabled else {}),
            {"overflow": str(result.overflow)} if result.skipped else None,
        )
        if result.skipped and self._engine.scaler.worth_saying:
            self._line.note(str(result.overflow))
            if self._engine.scaler.advice:
                self._line.note(self._engine.scaler.advice)
        if self._line.renews or step % self._config.log.every == 0 or step == self._config.steps:
            left_s = (self._config.steps - step) * total / len(self._recent)
            self._line.show(Progress(step, self._config.steps, result.loss, speed, left_s, waiting))

    def evaluated(self, loss: float) -> None:
        """The validation loss after the present step is `loss`."""
        if self._metrics is not None:
            step = self._engine.step_number
            self._metrics.write(step, {"validation_loss": loss})
            self._line.note(f"step {step}: validation loss {loss:.3f}")

    def saved(self, folder: Path) -> None:
        """The present state is in checkpoint `folder`."""
        if self._active:
            self._line.note(f"saved {folder}")

    def finished(self, tokenizer: Tokenizer) -> None:
        """The last step is done: write the loss curve and a sample, and say where they are."""
        if not self._active:
            return
        from farandole.train.report import draw_loss_curve, sample_text  # matplotlib takes a second

        took = self.elapsed_s
        model = self._config.model.gpt()
        title = f"{self._config.name}: {short(model.parameters)} parameters, {self._ranks}"
        text = sample_text(self._engine.model, tokenizer, self._config)
        self._line.note(f"\n{text}\n")
        done = f"{counted(self._config.steps, 'step')} in {minutes(took)} on {self._ranks}"
        sample = self._run / "sample.txt"
        try:
            curve = draw_loss_curve(self._run, title)
            sample.write_text(text)
            self._line.note(f"{done}; loss curve {curve}, sample {sample}")
        except OSError as error:  # the checkpoint is written, and they can be made again
            self._line.note(f"{done}; no loss curve and no sample are kept: {reason(error, self._run)}")

    def _introduce(self) -> None:
        model = self._config.model.gpt()
        self._line.note(f"run {self._run}")
        self._line.note(
            f"model {short(model.parameters)} parameters, batch {self._config.batch} x {model.context} "
            f"tokens on {self._ranks}"
        )
        self._line.note(f"precision {self._choice.name} ({self._choice.reason})")
        for note in memory_notes(self._engine, self._runtime.local_size):
            self._line.note(note)
        if self._resumed:
            self._line.note(f"going on after step {self._resumed}")
