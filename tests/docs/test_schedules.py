"""The table of all pipeline schedules has the numbers of the simulator, in the order of the picture."""

from __future__ import annotations

import re

from docs.pictures.pipeline import all_timelines
from tests.docs.prose import ROOT

ROW = re.compile(r"^\| `(.+?)` \| ([\d.]+) \| ([\d.]+ %) \| ([\d., ]+) \| (\d) \| \S", re.MULTILINE)


def test_the_table_has_the_numbers_of_the_simulator() -> None:
    page = (ROOT / "docs/guides/pipeline.md").read_text()
    section = page.partition("\n## All schedules on one time axis\n")[2].partition("\n## ")[0]
    assert ROW.findall(section) == [
        (
            timeline.schedule.name,
            f"{timeline.makespan:g}",
            f"{100 * timeline.idle:.1f} %",
            ", ".join(f"{peak:g}" for peak in timeline.peaks),
            str(len(timeline.schedule.placement)),
        )
        for timeline in all_timelines()
    ]
