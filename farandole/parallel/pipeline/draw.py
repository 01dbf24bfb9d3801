"""Draw timelines as text or as an image (PNG, SVG or PDF).

In text, each cell is one unit of time.  F0 is the forward pass of micro-batch 0, and B0 is its backward pass.  Dashes
continue an action, and dots are idle time.  Actions of a later chunk or of the second replica are in lower case:

    rank 0 F0F1. . B0--. B1--
    rank 1 . F0B0--F1B1--. .
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farandole._extras import optional_import
from farandole.parallel.pipeline.schedule import Backward, BackwardInput, BackwardWeight, Forward
from farandole.parallel.pipeline.simulate import Timeline
from farandole.parallel.pipeline.trace import KINDS, trace, write_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    Forward: ("#3d6cb9", "#8aa9dd"),
    Backward: ("#0b6e4f", "#6bb59b"),
    BackwardInput: ("#2a9d8f", "#93d3ca"),
    BackwardWeight: ("#c98a1b", "#e6bf77"),
}
"""The colors of each kind of action: in the first chunk or replica, and in a later chunk or the second replica."""


def text(timeline: Timeline, columns: int = 200) -> str:
    """Return the timeline as text, at most `columns` characters wide."""
    schedule = timeline.schedule
    shortest = min((s.end - s.start for spans in timeline.spans for s in spans if s.end > s.start), default=1)
    cell = 1 + len(str(schedule.micro_batches - 1))
    label = len(f"rank {schedule.ranks - 1} ")
    units = max(1, round(timeline.makespan / shortest))
    cells = min(units, max(1, (columns - label) // cell))
    scale = cells / timeline.makespan if timeline.makespan else 0.0
    lines = []
    for rank, spans in enumerate(timeline.spans):
        line = [("." + " " * (cell - 1))] * cells
        for span in spans:
            first, last = (
                round(span.start * scale),
                max(round(span.start * scale) + 1, round(span.end * scale)),
            )
            entry = schedule.label(span.action).ljust(cell)
            for place in range(first, min(last, cells)):
                line[place] = entry if place == first else ("-" * cell)
        lines.append(f"rank {rank}".ljust(label) + "".join(line).rstrip())
    return "\n".join(lines)


def summary(timeline: Timeline) -> str:
    """Return a line of text with the makespan, the idle time and the peak activation memory."""
    parts = [
        f"makespan {timeline.makespan:g}",
        f"idle {100 * timeline.idle:.1f} %",
        f"peak activations {timeline.peak:g}",
    ]
    if timeline.repeated:
        parts.insert(2, f"lost with recomputation {100 * timeline.lost:.1f} %")
    if timeline.schedule.mirrored:
        parts.append(f"weights 2x, gradients summed {timeline.schedule.reductions}x per step")
    return ", ".join(parts)


def draw(timelines: Sequence[Timeline], path: str | Path, rank_height: float = 0.26) -> None:
    """Draw timelines one below another, with a common time axis.

    Args:
        rank_height: the height of a rank's row, in inches.
        path: a file whose name ends in .png, .svg or .pdf.
    """
    with optional_import():
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    longest = max(timeline.makespan for timeline in timelines)
    heights = [timeline.schedule.ranks * rank_height + 0.45 for timeline in timelines]
    figure, axes = plt.subplots(
        len(timelines),
        1,
        figsize=(11, sum(heights) + 0.4),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        draw_timeline(axis, timeline, longest)
    used = {type(s.action) for timeline in timelines for spans in timeline.spans for s in spans}
    kinds = [kind for kind in COLORS if kind in used]
    handles = [Rectangle((0, 0), 1, 1, fc=COLORS[kind][0]) for kind in kinds]
    labels = [KINDS[kind] for kind in kinds]
    if any(timeline.schedule.chunks > 1 or timeline.schedule.mirrored for timeline in timelines):
        handles.append(Rectangle((0, 0), 1, 1, fc=COLORS[Forward][1]))
        labels.append("light: later chunk, or second replica")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_timeline(axis: Axes, timeline: Timeline, longest: float) -> None:
    """Draw one timeline, with a time axis that ends at `longest`."""
    from matplotlib.patches import Rectangle

    schedule = timeline.schedule
    for rank, spans in enumerate(timeline.spans):
        axis.add_patch(Rectangle((0, rank), timeline.makespan, 0.9, fc="#dfe4e8", ec="none"))
        for span in spans:
            action, width = span.action, span.end - span.start
            light = schedule.is_second(action)
            color = COLORS[type(action)][light]
            axis.add_patch(Rectangle((span.start, rank), width, 0.9, fc=color, ec="white", lw=0.4))
            if width > 0.0065 * len(str(action.micro_batch)) * longest:  # a digit needs 0.65 % of the width
                axis.text(
                    span.start + width / 2,
                    rank + 0.47,
                    str(action.micro_batch),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="black" if light else "white",
                )
    places = [rank + 0.45 for rank in range(schedule.ranks)]
    axis.set(xlim=(0, longest * 1.001), ylim=(schedule.ranks, -0.05), xticks=[])
    axis.set_yticks(places, [str(rank) for rank in range(schedule.ranks)], fontsize=7)
    axis.set_ylabel("rank", fontsize=8)
    axis.tick_params(length=0, labelsize=7)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_title(schedule.name, fontsize=9.5, weight="bold", loc="left")
    axis.set_title(summary(timeline), fontsize=8.5, loc="right")


def write(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write timelines to an image file, or a single timeline to a .json trace.

    Raises:
        ValueError: for an unknown suffix, or a trace of several timelines.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf", ".json"):
        raise ValueError(f"{path}: expected a name that ends in .png, .svg, .pdf or .json (Perfetto)")
    if suffix != ".json":
        draw(timelines, path)
        return
    if len(timelines) > 1:
        raise ValueError(
            f"{path}: a trace contains one schedule, got {len(timelines)}; draw a .png or .svg instead"
        )
    write_trace(trace(timelines[0]), Path(path))
