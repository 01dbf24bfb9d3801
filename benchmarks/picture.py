"""Draw the pictures for the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from benchmarks.measure import human_bytes, human_seconds

COLORS = {
    "persistent": "#7b2d8b",
    "communicator": "#c58bd0",
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
ZERO_COLORS = {
    "Farandole": "#0b6e4f",
    "DDP over farandole": "#9fd8c0",
    "FSDP2": "#c8553d",
    "DeepSpeed": "#3d5a80",
}
LIMITS = ("copy", "stream")
NAMES = {
    "persistent": "farandole, persistent operation",
    "communicator": "farandole, Communicator",
    "farandole": "farandole, torch.distributed",
    "shared buffer": "farandole, buffer in shared memory",
    "core": "farandole, C core only",
    "gloo": "Gloo",
    "mpich": "MPICH (mpi4py)",
    "copy": "copy of the same size by every rank",
    "flat gloo": "Gloo, all ranks in one ring",
    "two levels": "farandole, two levels",
    "+ bf16": "farandole, bf16 between hosts",
    "+ fp16": "farandole, fp16 between hosts",
    "+ int8": "farandole, int8 between hosts",
    "stream": "limit: a TCP stream",
}
TITLES = {"latency": "latency", "bandwidth": "time per message, 64 messages at once"}


def draw_latencies(result: dict[str, Any], path: Path) -> None:
    """Draw time over message size, with one line per implementation and one panel per operation with several sizes."""
    operations = [
        name
        for name, figures in result.items()
        if isinstance(figures, dict) and name != "machine" and len(figures) > 1
    ]
    columns = min(3, len(operations))
    rows = -(-len(operations) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.2 * columns, 4.2 * rows), squeeze=False, layout="constrained"
    )
    for axis, operation in zip(axes.flat, operations, strict=False):
        for name, color in COLORS.items():
            points = [(int(size), row[name]) for size, row in result[operation].items() if name in row]
            if points:
                style = ":" if name in LIMITS else "-"
                axis.plot(
                    *zip(*points, strict=True), style, marker=".", color=color, label=NAMES.get(name, name)
                )
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", title=f"{TITLES.get(operation, operation)}, {result['ranks']} ranks")
        axis.set(xlabel="message size", ylabel="time")
        powers = [int(size).bit_length() - 1 for size in result[operation]]
        step = 4 if max(powers) - min(powers) > 8 else 2
        axis.set_xticks([1 << power for power in range(min(powers), max(powers) + 1, step)])
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human_bytes(int(x))))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human_seconds(y)))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(operations) :]:
        axis.set_visible(False)
    lines, names = axes.flat[0].get_legend_handles_labels()
    below = "outside lower center"
    figure.legend(lines, names, fontsize=8, frameon=False, loc=below, ncols=min(len(names), 2 * columns))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_zero(result: dict[str, Any], path: Path) -> None:
    """Draw the step time and memory of each implementation and ZeRO stage as bars."""
    figures = [f for f in result["implementations"] if f["name"] != "no communication"]
    labels = [f"{f['name']}, stage {f['stage']}" for f in figures]
    colors = [ZERO_COLORS.get(f["name"], "#888888") for f in figures]
    figure, (time, memory) = plt.subplots(
        1, 2, figsize=(12, 0.8 + 0.42 * len(figures)), sharey=True, layout="constrained"
    )
    ratios, low, high = (
        [f[key] / f["limit_seconds"] for f in figures]
        for key in ("seconds", "fastest_seconds", "slowest_seconds")
    )
    spread = [
        [r - a for r, a in zip(ratios, low, strict=True)],
        [b - r for r, b in zip(ratios, high, strict=True)],
    ]
    time.barh(
        labels,
        ratios,
        color=colors,
        xerr=spread,
        error_kw={"ecolor": "#555555", "elinewidth": 1, "capsize": 3},
    )
    for number, f in enumerate(figures):
        words = f" {human_seconds(f['seconds'])}, limit {human_seconds(f['limit_seconds'])}"
        time.text(max(high[number], ratios[number]) + 0.02, number, words, va="center", fontsize=8)
    time.axvline(1, color="#888888", linestyle=":")
    time.set_xlim(0, 1.5 * max(high))
    time.set(
        xlabel="step time relative to the limit without communication",
        title="time",
    )
    memory.barh(labels, [(f["data_bytes"] - f["before_bytes"]) / (1 << 20) for f in figures], color=colors)
    memory.set(xlabel="MiB of all ranks together at the peak of a step", title="memory")
    time.invert_yaxis()
    for axis in (time, memory):
        axis.grid(alpha=0.25, axis="x")
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result['model']} parameters, {result['precision']}, {result['ranks']} ranks")
    figure.savefig(path, dpi=110)
    plt.close(figure)
