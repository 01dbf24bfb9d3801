"""Draws docs/pictures/rooms.png: the rooms of the package and which way imports point.

python docs/pictures/draw_rooms.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

FLOORS = [
    ("commands", [("cli", "one file per command")], "#3d5a80"),
    ("measures", [("bench", "training and collectives,\nin the field's formats")], "#2f6f7e"),
    ("compatible", [("horovod", "scripts written for Horovod:\nnamed requests, fusion, elastic")], "#1f7566"),
    (
        "what runs",
        [
            ("train", "configuration, loop,\ncheckpoints, reports"),
            ("launch", "finds or starts ranks,\ndivides cores"),
        ],
        "#0b6e4f",
    ),
    ("plans", [("parallel", "data parallel: gradient buckets, overlap;\nparameter servers")], "#35876a"),
    ("ranks", [("comm", "Communicator, torch backend; several hosts,\nMPI, compression; errors")], "#5fa58c"),
    ("memory", [("native", "C: shared memory, waiting,\nreductions, messages, TCP")], "#8fc3b0"),
]
ASIDE = [("models", "GPT, ResNet, written\nfor one device"), ("data", "text, tokens,\nsampler")]


def box(
    axis: plt.Axes, x: float, y: float, width: float, height: float, name: str, text: str, colour: str
) -> None:
    """One room."""
    axis.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", fc=colour, ec="none")
    )
    axis.text(
        x + 0.2,
        y + height - 0.22,
        name,
        color="white",
        weight="bold",
        va="top",
        fontsize=12,
        family="monospace",
    )
    axis.text(x + 0.2, y + height - 0.55, text, color="white", va="top", fontsize=9)


def main() -> None:
    """Draw the house."""
    figure, axis = plt.subplots(figsize=(9.5, 9.6), layout="constrained")
    height, gap, width = 1.15, 0.35, 7.0
    for floor, (label, rooms, colour) in enumerate(FLOORS):
        y = (len(FLOORS) - 1 - floor) * (height + gap)
        axis.text(-0.25, y + height / 2, label, ha="right", va="center", fontsize=10, color="#555555")
        each = (width - 0.2 * (len(rooms) - 1)) / len(rooms)
        for number, (name, text) in enumerate(rooms):
            box(axis, number * (each + 0.2), y, each, height, name, text, colour)
        if floor + 1 < len(FLOORS):
            axis.annotate(
                "",
                (width / 2, y - gap + 0.02),
                (width / 2, y - 0.02),
                arrowprops={"arrowstyle": "-|>", "color": "#555555"},
            )
    for number, (name, text) in enumerate(ASIDE):
        y = (2 - number) * (height + gap)
        box(axis, width + 0.7, y, 2.2, height, name, text, "#c8553d")
    axis.text(
        width + 1.8,
        2 * (height + gap) + height + 0.15,
        "know nothing of ranks",
        ha="center",
        fontsize=9,
        color="#555555",
    )
    axis.text(
        width + 1.8,
        height + gap - 0.15,
        "imported by train and bench;\nimport nothing but torch",
        ha="center",
        va="top",
        fontsize=9,
        color="#555555",
    )
    axis.set(xlim=(-1.6, width + 3.1), ylim=(-0.2, len(FLOORS) * (height + gap)))
    axis.set_axis_off()
    figure.savefig(Path(__file__).with_name("rooms.png"), dpi=110)


if __name__ == "__main__":
    main()
