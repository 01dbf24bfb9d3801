"""Draw the timelines of the pipeline schedules, one picture per family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from farandole.parallel.pipeline.draw import draw
from farandole.parallel.pipeline.schedule import build
from farandole.parallel.pipeline.simulate import simulate

RANKS, MICRO_BATCHES = 4, 8

FAMILIES = {
    "pipeline_one_way": ("gpipe", "1f1b", "interleaved", "zb-h1"),
    "pipeline_v": ("zb-v", "dualpipe-v", "v-half", "v-min"),
    "pipeline_small": ("layer", "layer-w", "gems", "gems-w"),
    "pipeline_mirrored": ("chimera", "1f1b"),
}
"""The schedules of each picture."""


def draw_family(names: tuple[str, ...], path: Path) -> None:
    """Draw the timelines of some schedules on one time axis."""
    draw([simulate(build(name, RANKS, MICRO_BATCHES)) for name in names], path)


def drawings() -> dict[str, Callable[[Path], None]]:
    """Return the functions that draw the pictures, by name."""
    return {name: partial(draw_family, names) for name, names in FAMILIES.items()}
