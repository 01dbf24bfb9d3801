"""Plot a run's loss curve."""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path

import matplotlib

from farandole.train.metrics import read_metrics

Point = tuple[float, float]

_INK, _FAINT, _TRAINING, _VALIDATION = "#22313f", "#d8dee4", "#7aa6c2", "#c8553d"


def draw_loss_curve(run: Path, title: str, label: str = "loss") -> Path:
    """Plot the training and validation losses of `run` to `loss.png`, and return the file's path."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt  # import after selecting a backend that needs no display
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    records = read_metrics(run / "metrics.jsonl")
    training = [(r["step"], r["loss"]) for r in records if math.isfinite(r.get("loss", math.nan))]
    validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]

    figure = plt.figure(figsize=(8, 4.5), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
    axes = figure.subplots()
    axes.plot(*zip(*training, strict=True), color=_TRAINING, linewidth=0.8, alpha=0.35)
    smooth = _smooth(training)
    axes.plot(*zip(*smooth, strict=True), color=_TRAINING, linewidth=2)
    ends = [("training", smooth[-1], _TRAINING)]
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
    axes.set_xlim(0, training[-1][0])  # the layout reserves space to the right for the line labels

    path = run / "loss.png"
    figure.savefig(path)
    plt.close(figure)
    return path


def _smooth(points: list[Point]) -> list[Point]:
    """Return centered moving averages over 1/15 of the run, with fewer points at both ends."""
    reach = len(points) // 30
    sums = [0.0, *accumulate(value for _, value in points)]
    smooth = []
    for i, (step, _) in enumerate(points):
        first, end = i - min(i, reach), min(i + min(i, reach) + 1, len(points))
        smooth.append((step, (sums[end] - sums[first]) / (end - first)))
    return smooth
