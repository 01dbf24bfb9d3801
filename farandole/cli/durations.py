"""Parse durations on the command line."""

from __future__ import annotations

import math

import typer

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def parse_duration(text: str) -> float:
    """Parse a duration such as 100ms, 2s or 1min, and return it in seconds.

    Raises:
        typer.BadParameter: if the text is not a positive number with a unit.
    """
    unit = text.lstrip("0123456789.")
    try:
        seconds = float(text.removesuffix(unit)) * UNITS[unit.strip()]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise typer.BadParameter(f"expected a positive time with a unit, such as 100ms or 2s, got {text!r}")
    return seconds
