"""Plot latency and bandwidth against message size, with one line per backend."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from farandole.bench.collectives.measure import Row
from farandole.bench.collectives.operations import OPERATIONS
from farandole.bench.collectives.setup import short_size
from farandole.data.wording import counted

COLORS = {
    "farandole": "#0b6e4f",
    "shared": "#35b07f",
    "gloo": "#c8553d",
    "mpi": "#3d5a80",
    "farandole-mpi": "#8a9bbd",
    "nccl": "#76b900",
}
LABELS = {"shared": "farandole, shared buffers", "mpi": "MPI (mpi4py)", "gloo": "Gloo", "nccl": "NCCL"}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_PANELS = {
    "avg_us": ("time", True),
    "busbw": ("bus bandwidth (GB/s)", True),
    "mb_per_s": ("bandwidth (MB/s)", True),
    "pure_us": ("pure communication", True),
    "overlap": ("overlap (%)", False),
}
"""The row keys to plot; the values are the label of the axis and whether the axis is logarithmic."""


def draw(rows: list[Row], ranks: int, path: str) -> None:
    """Plot the rows of all operations except barriers; the suffix of `path` selects the file format."""
    operations = [name for name in dict.fromkeys(row["operation"] for row in rows) if OPERATIONS[name].sized]
    panels = [
        (name, key)
        for name in operations
        for key in _PANELS
        if any(key in row for row in rows if row["operation"] == name)
    ]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5.6 * columns, 3.9 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, key) in zip(axes.flat, panels, strict=False):
        among = 2 if OPERATIONS[name].messages else ranks
        _draw_panel(axis, [row for row in rows if row["operation"] == name], key)
        axis.set_title(f"{name}, {counted(among, 'rank')}: {_PANELS[key][0]}", fontsize=10)
    fullest = max(axes.flat, key=lambda axis: len(axis.get_lines()))
    fullest.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_panel(axis: Axes, rows: list[Row], key: str) -> None:
    for backend in dict.fromkeys(row["backend"] for row in rows):
        points = [(row["size"], row[key]) for row in rows if row["backend"] == backend]
        axis.plot(
            *zip(*points, strict=True),
            marker=".",
            linewidth=1.5,
            color=COLORS[backend],
            label=LABELS.get(backend, backend),
        )
    axis.set_xscale("log", base=2)
    sizes = sorted({row["size"] for row in rows})
    axis.set_xticks(sizes[:: -(-len(sizes) // 8)])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: short_size(round(size))))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("bytes")
    if _PANELS[key][1]:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=12))
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        axis.set_ylim(-3, 103)
    axis.yaxis.set_major_formatter(FuncFormatter(_seconds if key.endswith("_us") else _plain))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _seconds(microseconds: float, _: Any = None) -> str:
    seconds = microseconds * 1e-6
    value, unit = next(
        ((seconds / each, unit) for each, unit in _UNITS if seconds >= each), (microseconds, "us")
    )
    return f"{value:.3g} {unit}"


def _plain(value: float, _: Any = None) -> str:
    return f"{value:g}"
