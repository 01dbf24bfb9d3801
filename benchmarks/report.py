"""Update the tables in docs/benchmarks/results.md from the saved results.

python -m benchmarks.report
"""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks import compression, horovod, hosts, mpi, offload, overheads, overlap, point_to_point, zero
from benchmarks.collectives import table
from benchmarks.measure import RESULTS, arguments, human_seconds, markdown_table, records_table

PAGE = RESULTS / "results.md"


def main() -> None:
    """Replace the text between each `<!-- NAME OPERATION -->` and `<!-- end -->` with a table from NAME.json."""

    def fill(match: re.Match[str]) -> str:
        name, operation = match["name"], match["operation"]
        result = json.loads((RESULTS / f"{name}.json").read_text())
        text = machine_line(result["machine"]) if operation == "machine" else tables(name, operation, result)
        return f"<!-- {name} {operation} -->\n{text}\n<!-- end -->"

    pattern = r"<!-- (?P<name>[\w-]+) (?P<operation>\w+) -->\n.*?<!-- end -->"
    PAGE.write_text(re.sub(pattern, fill, PAGE.read_text(), flags=re.DOTALL))


def tables(name: str, operation: str, result: dict[str, Any]) -> str:
    """Return the table for one operation in a result."""
    if name.startswith("collectives"):
        return table(operation, result[operation])
    if name == "point-to-point":
        return point_to_point.table(operation, result[operation])
    if name == "overheads":
        return overheads.table(operation, result)
    if name.startswith("overlap"):
        return overlap.table(result[operation])
    if name.startswith("hosts"):
        return hosts.table(result[operation])
    if name == "compression":
        return compression.table(result[operation])
    if name.startswith("horovod"):
        return horovod.table(result)
    if name.startswith("zero"):
        return zero.table(result)
    if name.startswith("mpi"):
        return mpi.table(operation, {int(size): row for size, row in result[operation].items()})
    if name == "offload":
        return f"{offload.table(result)}\n\n{offload.notes(result)}"
    if name.startswith("pipeline"):
        return records_table(result[operation])
    if name == "pretrained" or name.startswith(("language", "axes", "experts", "serving", "speculation")):
        return records_table(result["rows"])
    seconds = result["seconds"]
    if name.startswith("fsdp2"):
        gloo = seconds["FSDP2 over Gloo"]
        rows = [[what, human_seconds(s), f"{1 / s:.1f}", f"{gloo / s:.1f}"] for what, s in seconds.items()]
        return markdown_table(["", "step", "steps/s", "x Gloo"], rows)
    one, gloo = seconds["one rank"], seconds["DDP over Gloo"]
    rows = [
        [what, f"{result['tokens_per_step'] / s:,.0f}", f"{one / s:.2f}", f"{gloo / s:.2f}"]
        for what, s in seconds.items()
    ]
    return markdown_table(["", "tokens/s", "x one rank", "x DDP over Gloo"], rows)


def machine_line(machine: dict[str, Any]) -> str:
    """Return a line that describes the machine."""
    return (
        f"Measured on {machine['cores']} cores of an {machine['processor']} (a virtual machine), torch "
        f"{machine['torch']}, farandole {machine['farandole']}, {machine['date']}."
    )


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    main()
