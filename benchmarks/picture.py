"""The pictures of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from benchmarks.measure import human_bytes, human_seconds

COLOURS = {
    "farandole": "#0b6e4f",
    "shared buffer": "#35b07f",
    "core": "#9fd8c0",
    "gloo": "#c8553d",
    "mpich": "#3d5a80",
    "copy": "#888888",
    "flat gloo": "#c8553d",
    "two levels": "#222222",
    "+ bf16": "#35b07f",
    "+ fp16": "#9fd8c0",
    "+ int8": "#0b6e4f",
    "stream": "#888888",
}
LIMITS = ("copy", "stream")
NAMES = {
    "farandole": "farandole, through torch.distributed",
    "shared buffer": "farandole, buffer in shared memory",
    "core": "farandole, the C core alone",
    "gloo": "Gloo",
    "mpich": "MPICH (mpi4py)",
    "copy": "limit: every rank copies as many bytes",
    "flat gloo": "Gloo, all ranks in one ring",
    "stream": "limit: a TCP stream",
}


def draw_latencies(result: dict[str, Any], path: Path) -> None:
    """Time over message size, one line per contender, one panel per operation."""
    operations = [name for name, figures in result.items() if isinstance(figures, dict) and name != "machine"]
    columns = min(3, len(operations))
    rows = -(-len(operations) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.2 * columns, 4.2 * rows), squeeze=False, layout="constrained"
    )
    for axis, operation in zip(axes.flat, operations, strict=False):
        for name, colour in COLOURS.items():
            points = [(int(size), row[name]) for size, row in result[operation].items() if name in row]
            if points:
                style = ":" if name in LIMITS else "-"
                axis.plot(
                    *zip(*points, strict=True), style, marker=".", color=colour, label=NAMES.get(name, name)
                )
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", title=f"{operation}, {result['ranks']} ranks", xlabel="bytes")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human_bytes(int(x))))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human_seconds(y)))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(operations) :]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=8, frameon=False, loc="upper left")
    figure.savefig(path, dpi=110)
    plt.close(figure)
