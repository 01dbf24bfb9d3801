"""Convert the results of checks to text, Markdown and JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import Result

MARKERS = re.compile(r"(<!-- gpu results -->\n).*?(<!-- end -->)", re.DOTALL)
FORMAT = 1
_HEADER = ("check", "ranks", "result", "seconds", "figures")


def figure(name: str, value: float, unit: str) -> str:
    """Format one figure, such as `step 12.3 ms`."""
    return f"{name} {value:.3g} {unit}".rstrip()


def _row(result: Result) -> tuple[str, ...]:
    figures = ", ".join(figure(name, value, unit) for name, (value, unit) in result.figures.items())
    said = figures if result.status == "passed" else result.reason
    seconds = "" if result.status == "skipped" else f"{result.seconds:.1f}"
    return result.name, str(result.ranks), result.status, seconds, said


def line(result: Result, width: int) -> str:
    """Return one row of the table; the first column is `width` characters wide."""
    name, ranks, status, seconds, said = _row(result)
    return f"{name:<{width}}  {ranks:>5}  {status:<7}  {seconds:>7}  {said}".rstrip()


def header(width: int) -> str:
    """Return the header of the table."""
    name, ranks, status, seconds, said = _HEADER
    return f"{name:<{width}}  {ranks:>5}  {status:<7}  {seconds:>7}  {said}"


def failures(results: Sequence[Result]) -> str:
    """Return the reasons and the last output of all failed checks."""
    parts = []
    for result in results:
        if result.status == "failed":
            text = "\n".join(f"    {line}" for line in result.error.splitlines())
            parts.append(f"{result.name} failed: {result.reason}\n{text}".rstrip())
    return "\n\n".join(parts)


def summary(results: Sequence[Result]) -> str:
    """Return the numbers of checks that passed, failed and were skipped."""
    counts = Counter(result.status for result in results)
    return ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped"))


def dump(results: Sequence[Result], machine: dict[str, Any]) -> str:
    """Return the results as JSON."""
    return json.dumps(
        {"format": FORMAT, "machine": machine, "checks": [asdict(result) for result in results]}, indent=1
    )


def load(text: str) -> tuple[list[Result], dict[str, Any]]:
    """Return the results and the machine from JSON.

    Raises:
        ValueError: The JSON has a different format version.
    """
    found = json.loads(text)
    if found.get("format") != FORMAT:
        raise ValueError(
            f"expected results of format {FORMAT}, got {found.get('format')}; run the checks again"
        )
    checks = []
    for each in found["checks"]:
        figures = {name: (value, unit) for name, (value, unit) in each["figures"].items()}
        checks.append(Result(**{**each, "figures": figures}))
    return checks, found["machine"]


def markdown(results: Sequence[Result], machine: dict[str, Any]) -> str:
    """Return the table for docs/guides/gpu.md."""
    said = ", ".join(f"{key} {value}" for key, value in machine.items())
    rows = [f"| {' | '.join(_HEADER)} |", "| --- | ---: | --- | ---: | --- |"]
    rows += [f"| {' | '.join(cell.replace('|', '/') for cell in _row(result))} |" for result in results]
    return f"{summary(results)}. Machine: {said}.\n\n" + "\n".join(rows) + "\n"


def fill(page: Path, text: str) -> None:
    """Replace the text between the markers in a page.

    Raises:
        ValueError: The page does not contain the markers.
    """
    before = page.read_text()
    if not MARKERS.search(before):
        raise ValueError(
            f"{page}: expected the markers <!-- gpu results --> and <!-- end -->, found none; add the markers"
        )
    page.write_text(MARKERS.sub(lambda match: f"{match[1]}{text}{match[2]}", before))
