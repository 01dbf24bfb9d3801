"""Draw the chart for `farandole plan`: one bar per plan, divided into memory categories."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from farandole.bench.plan_table import COLUMNS, choices, column, seconds, word
from farandole.bench.planning import Planned
from farandole.data.wording import counted, short, size
from farandole.plan import Plan
from farandole.planner import Estimate

COLORS = {
    "weights": "#0b6e4f",
    "gradients": "#35b07f",
    "optimizer": "#9fd8bf",
    "buffers": "#3d5a80",
    "activations": "#c8553d",
    "backward": "#f0a28e",
    "checkpoint": "#8a9bbd",
    "process": "#b9b9b9",
}
_GIB = 1 << 30


def draw(planned: Planned, path: str) -> None:
    """Draw the plans, with the best plan on top, to the file `path`; its suffix selects the format."""
    estimates, memory = planned.estimates, planned.machine.memory
    figure, axis = plt.subplots(figsize=(9.5, 1.6 + 0.32 * len(estimates)), layout="constrained")
    places = range(len(estimates))
    left = [0.0] * len(estimates)
    for name in COLUMNS:
        widths = [column(one, name) / _GIB for one in estimates]
        if any(widths):
            axis.barh(places, widths, left=left, color=COLORS[name], label=name, height=0.72)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    most = max(*left, memory / _GIB if memory < 4 * _GIB * max(left) else 0.0)
    for place, one in zip(places, estimates, strict=True):
        fits = one.fits(memory)
        label = 0.16 * most  # the approximate width of the label
        crosses = left[place] < memory / _GIB < left[place] + label
        axis.text(
            (memory / _GIB if crosses else left[place]) + 0.01 * most,
            place,
            f"{size(one.peak)}, {seconds(one.seconds)} s" + ("" if fits else ", does not fit"),
            va="center",
            fontsize=8,
            color="black" if fits else "#a01010",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    axis.axvline(memory / _GIB, color="#a01010", linewidth=1.4)
    axis.text(
        memory / _GIB,
        -0.75,
        f"{size(memory)} ",
        color="#a01010",
        fontsize=8,
        ha="right" if memory / _GIB > 0.5 * most else "left",
        va="bottom",
    )
    axis.set_yticks(places, [_name(one, planned) for one in estimates], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * most)
    axis.set_xlabel("GiB of the rank with the largest peak")
    parameters = short(planned.config.model.gpt().parameters)
    axis.set_title(
        f"{planned.config.name} ({parameters} parameters) on {counted(planned.ranks, 'rank')}: plans that "
        "fit come first, with the fastest on top",
        fontsize=10,
        loc="left",
        pad=16,
    )
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(COLUMNS), fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _name(one: Estimate, planned: Planned) -> str:
    words = [f"zero {one.plan.zero}"]
    for name in choices(planned.estimates)[1:]:
        value = word(one.plan, name).partition(":")[0]
        if value != word(Plan(), name) or name == "precision":
            words.append(
                value if name in ("precision", "schedule") else name if value == "yes" else f"{name} {value}"
            )
    return ", ".join(words)
