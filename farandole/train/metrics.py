"""Write a run's metrics to JSON-lines files, TensorBoard and Weights & Biases, and plot the loss curve.

Each line in `metrics.jsonl` is an object with `step` and the metrics for that step:

    {"step": 20, "loss": 5.1, "learning_rate": 0.002, "gradient_norm": 0.9, "tokens_per_s": 19000.0,
     "waiting_share": 0.01, "memory_bytes": 412000000, "model_flops_utilization": 0.71, "elapsed_s": 9.1}
    {"step": 100, "validation_loss": 4.2}

Each line in `samples.jsonl` is an object with `step` and the task's report after that step:

    {"step": 100, "text": "def read(self): ..."}

`memory_bytes` is rank 0's peak memory.  `model_flops_utilization`, written only for transformers, is the model's
floating-point operations per second, divided by the matrix-product speed measured on all ranks before the first step.

The unit of the throughput depends on the task, as in `images_per_s`.  A task can add metrics, such as
`validation_accuracy`.  With fp16, a step also has `loss_scale`, and a skipped step has `overflow`, a description of the
cause.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from textwrap import indent
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.record_writer import RecordWriter

from farandole.comm.notices import warn_once
from farandole.data.wording import disk_failure
from farandole.train.config import ConfigError
from farandole.train.run_folder import LOSS_CURVE, DiskError

Record = dict[str, float]


class MetricsWriter:
    """Appends metrics to the files of `run`, on rank 0.

    When a run resumes from `resumed_step`, the metrics for later steps are deleted.  If TensorBoard files cannot be
    written, the writer prints a warning and stops writing them.

    Raises:
        DiskError: if `metrics.jsonl` cannot be written.
        ConfigError: if the Weights & Biases run cannot be started.
    """

    def __init__(
        self,
        run: Path,
        *,
        tensorboard: bool,
        wandb: bool = False,
        config: Mapping[str, Any] | None = None,
        resumed_step: int | None = None,
    ) -> None:
        self._path, self._samples = run / "metrics.jsonl", run / "samples.jsonl"
        self._tensorboard: TensorBoardWriter | None = None
        for path in (self._path, self._samples):
            if path.exists() or path == self._path:
                self._forget_later(path, -1 if resumed_step is None else resumed_step)
        if tensorboard:
            try:
                self._tensorboard = TensorBoardWriter(run / "tensorboard", resumed_step)
            except OSError as error:
                self._disable_tensorboard(error)
        self._wandb = _start_wandb(run, config or {}) if wandb else None

    def write(self, step: int, record: Record, texts: Mapping[str, str] | None = None) -> None:
        """Write the metrics for `step`.  `texts` are written only to `metrics.jsonl`."""
        self._append(self._path, {"step": step, **record, **(texts or {})})
        self._write_tensorboard(step, _scalars(record))
        if self._wandb is not None:
            self._wandb.log(record, step=step)

    def write_sample(self, step: int, text: str) -> None:
        """Write the task's report after `step`."""
        self._append(self._samples, {"step": step, "text": text})
        self._write_tensorboard(step, [_text("sample/text_summary", text)])
        if self._wandb is not None:
            self._wandb.log({"sample": text}, step=step)

    def close(self, failed: bool = False) -> None:
        """Finish the Weights & Biases run, and mark the run as failed or successful."""
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))
            self._wandb = None

    def _append(self, path: Path, record: Mapping[str, Any]) -> None:
        try:
            with path.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:
            raise self._error(path, error) from error

    def _forget_later(self, path: Path, step: int) -> None:
        """Delete the records in `path` for steps after `step`."""
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        partial = path.with_name(path.name + ".tmp")
        try:
            partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise self._error(path, error) from error

    def _write_tensorboard(self, step: int, values: Sequence[Summary.Value]) -> None:
        if self._tensorboard is not None:
            try:
                self._tensorboard.write(step, values)
            except OSError as error:
                self._disable_tensorboard(error)

    def _error(self, path: Path, error: OSError) -> DiskError:
        return DiskError(f"cannot write {path}: {disk_failure(error, path.parent)}")

    def _disable_tensorboard(self, error: OSError) -> None:
        self._tensorboard = None
        why = disk_failure(error, self._path.parent)
        warn_once(
            f"cannot write TensorBoard files: {why}; training continues, and the metrics are in {self._path}"
        )


def _start_wandb(run: Path, config: Mapping[str, Any]) -> Any:
    import wandb

    try:
        return wandb.init(
            project="farandole", name=run.name, id=run.name, dir=str(run), config=dict(config), resume="allow"
        )
    except Exception as error:  # wandb raises exceptions of many types
        raise ConfigError(
            f"cannot start the Weights & Biases run: {error}; use WANDB_MODE=offline or log.wandb=false"
        ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl` or `samples.jsonl` file, in order.

    Incomplete lines, which a killed run can leave, are ignored.
    """
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


_VERSION = "brain.Event:2"  # the format version, which is the first record in every file


def _scalars(record: Mapping[str, float]) -> list[Summary.Value]:
    return [Summary.Value(tag=name, simple_value=value) for name, value in record.items()]


def _text(tag: str, text: str) -> Summary.Value:
    """Return a TensorBoard text summary, with `text` indented so that Markdown keeps the line breaks."""
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    content = TensorProto(dtype="DT_STRING", string_val=[indent(text, "    ").encode()], tensor_shape=shape)
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=tag, tensor=content, metadata=SummaryMetadata(plugin_data=plugin))


class TensorBoardWriter:
    """Writes summaries to an event file in `folder`.

    Unlike torch's `SummaryWriter`, this class writes in the calling thread, so that the caller can handle errors
    such as a full disk.  With `resumed_step`, TensorBoard hides the summaries for later steps in existing files.

    Raises:
        OSError: if the file cannot be written.
    """

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        if resumed_step is None:
            self._append(Event(file_version=_VERSION))
        else:
            again = resumed_step + 1
            restart = Event(step=again, session_log=SessionLog(status=SessionLog.START))
            self._append(Event(step=again, file_version=_VERSION), restart)

    def write(self, step: int, values: Sequence[Summary.Value]) -> None:
        """Write the summaries for `step`."""
        self._append(Event(step=step, summary=Summary(value=values)))

    def _append(self, *events: Event) -> None:
        with self._path.open("ab") as file:
            records = RecordWriter(file)
            for event in events:
                event.wall_time = time.time()
                records.write(event.SerializeToString())


Point = tuple[float, float]

_INK, _FAINT, _TRAINING, _VALIDATION = "#22313f", "#d8dee4", "#7aa6c2", "#c8553d"


def draw_loss_curve(run: Path, title: str, label: str = "loss") -> Path:
    """Plot the training and validation losses of `run` to `loss.png`, and return the path of this file."""
    import matplotlib  # imported here, because the import takes a second

    matplotlib.use("agg")
    import matplotlib.pyplot as plt  # import after selecting a backend that needs no display
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    records = read_metrics(run / "metrics.jsonl")
    training, validation = (
        [(r["step"], r[name]) for r in records if math.isfinite(r.get(name, math.nan))]
        for name in ("loss", "validation_loss")
    )

    figure = plt.figure(figsize=(8, 4.5), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
    axes = figure.subplots()
    ends: list[tuple[str, Point, str]] = []
    if training:  # with fp16, all losses can be infinite
        axes.plot(*zip(*training, strict=True), color=_TRAINING, linewidth=0.8, alpha=0.35)
        smooth = _smooth(training)
        axes.plot(*zip(*smooth, strict=True), color=_TRAINING, linewidth=2)
        ends.append(("training", smooth[-1], _TRAINING))
    if validation:
        dots = axes.plot(*zip(*validation, strict=True), "o-", color=_VALIDATION, linewidth=1.6, markersize=4)
        dots[0].set_clip_on(False)  # the last point lies on the border
        ends.append(("validation", validation[-1], _VALIDATION))
    for up, (name, point, color) in zip((-11, 5), sorted(ends, key=lambda end: end[1][1]), strict=False):
        axes.annotate(
            f"{name} {point[1]:.2f}",
            point,
            (8, up),
            textcoords="offset points",
            color=color,
            fontsize=9,
            fontweight="bold",
        )
    axes.set_title(title, loc="left", color=_INK, fontsize=12, pad=12)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(label, color=_INK)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(colors=_INK, length=0)
    last = max((point[0] for _, point, _ in ends), default=1)
    axes.set_xlim(0, last)  # the layout reserves space to the right for the line labels

    path = run / LOSS_CURVE
    figure.savefig(path)
    plt.close(figure)
    return path


def _smooth(points: list[Point]) -> list[Point]:
    """Return centered moving averages over 1/15 of the run, with smaller windows near both ends."""
    reach = len(points) // 30
    sums = [0.0, *accumulate(value for _, value in points)]
    smooth = []
    for i, (step, _) in enumerate(points):
        first, end = i - min(i, reach), min(i + min(i, reach) + 1, len(points))
        smooth.append((step, (sums[end] - sums[first]) / (end - first)))
    return smooth
