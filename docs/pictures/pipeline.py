"""Draw the timelines of the pipeline schedules: one picture per family, and one of all schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from farandole.parallel.pipeline.draw import draw
from farandole.parallel.pipeline.schedule import build, registered
from farandole.parallel.pipeline.simulate import Timeline, simulate

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


def all_timelines() -> list[Timeline]:
    """Return the timelines of all schedules, fastest first."""
    timelines = [simulate(build(each.name, RANKS, MICRO_BATCHES)) for each in registered()]
    return sorted(timelines, key=lambda timeline: timeline.makespan)


def drawings() -> dict[str, Callable[[Path], None]]:
    """Return the functions that draw the pictures, by name."""
    families = {name: partial(draw_family, names) for name, names in FAMILIES.items()}
    return families | {"pipeline_all": lambda path: draw(all_timelines(), path, rank_height=0.16)}
