"""Plot the distributions of TTFT, TPOT and inter-token latency for each scenario, and the speed-up from concurrency."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from farandole.bench.serving.results import Summary

COLORS = {"singlestream": "#3d5a80", "offline": "#0b6e4f", "server": "#c8553d"}
_TITLES = {"ttft_s": "time to first token", "tpot_s": "time per output token", "itl_s": "inter-token latency"}


def draw(summaries: Sequence[Summary], speed_up: Sequence[Summary], title: str, path: str) -> None:
    """Plot all measurements to the file `path`; its suffix selects the format."""
    columns = len(_TITLES) + bool(speed_up)
    figure, axes = plt.subplots(1, columns, figsize=(4.1 * columns, 3.9), layout="constrained")
    for axis, name in zip(axes, _TITLES, strict=False):
        _draw_distribution(axis, summaries, name)
    axes[0].set_ylabel("requests with at most this time")
    axes[2].set_ylabel("tokens with at most this time")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False
    )
    if speed_up:
        _draw_speed_up(axes[-1], speed_up)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_distribution(axis: Axes, summaries: Sequence[Summary], name: str) -> None:
    for summary in summaries:
        values = sorted(value for sample in summary["samples"] for value in sample.get(name, []))
        if not values:
            continue
        scenario = summary["scenario"]
        shares = [(number + 1) / len(values) for number in range(len(values))]
        milliseconds = [1e3 * value for value in values]
        axis.step(milliseconds, shares, where="post", color=COLORS[scenario], label=scenario)
    limits = [summary["limit"][name] for summary in summaries if "limit" in summary]
    if limits:
        axis.axvline(1e3 * min(limits), color="black", linestyle=":", linewidth=1.2, label="limit")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("ms")
    axis.set_title(_TITLES[name], fontsize=10)


def _draw_speed_up(axis: Axes, rows: Sequence[Summary]) -> None:
    counts = [row["requests"] for row in rows]
    axis.plot(counts, [row["speed_up"] for row in rows], marker=".", color="#0b6e4f", label="measured")
    if "limit_s" in rows[0]:
        limits = [row["sequential_s"] / row["limit_s"] for row in rows]
        axis.plot(counts, limits, color="black", linestyle=":", linewidth=1.2, label="limit")
    axis.axhline(1, color="#b9b9b9", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_ylim(0)
    axis.set_xlabel("concurrent requests")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.set_title("speed-up over sequential requests", fontsize=10)
    axis.legend(fontsize=8, frameon=False)
