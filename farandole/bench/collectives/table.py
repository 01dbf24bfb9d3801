"""Print the results with the same columns as the OSU Micro-Benchmarks and nccl-tests.

Each line shows one backend and one size.  The backend is the last column, so scripts for those benchmarks find the
other columns in the expected positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farandole.bench.collectives.operations import WINDOW, Operation
from farandole.bench.collectives.setup import CollectivesSetup
from farandole.data.wording import counted

Column = tuple[str, str, Callable[[Any], str]]


def _decimals(places: int) -> Callable[[float], str]:
    return lambda number: f"{number:.{places}f}"


def _validation(errors: int) -> str:
    return "Fail" if errors else "Pass"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "avg_us": ("Avg Latency(us)", _decimals(2)),
    "min_us": ("Min Latency(us)", _decimals(2)),
    "max_us": ("Max Latency(us)", _decimals(2)),
    "mb_per_s": ("Bandwidth (MB/s)", _decimals(2)),
    "overall_us": ("Overall(us)", _decimals(2)),
    "compute_us": ("Compute(us)", _decimals(2)),
    "pure_us": ("Pure Comm.(us)", _decimals(2)),
    "overlap": ("Overlap(%)", _decimals(2)),
    "iterations": ("Iterations", str),
    "errors": ("Validation", _validation),
    "algbw": ("algbw(GB/s)", _decimals(3)),
    "busbw": ("busbw(GB/s)", _decimals(3)),
}
"""The heading and the formatting function of each measured column, keyed by the key of `Row`."""

_SIZE_WIDTH = 12


class Table:
    """Formats the table of one operation, one line at a time; the caller prints the lines."""

    def __init__(self, operation: Operation, setup: CollectivesSetup) -> None:
        self._operation = operation
        keys = ["overall_us", "compute_us", "pure_us", "overlap"] if setup.overlap else ["avg_us"]
        if operation.is_bandwidth:
            keys = ["mb_per_s"]
        if setup.full:
            keys += ["iterations"] if operation.messages else ["min_us", "max_us", "iterations"]
        if setup.validate and operation.sized:
            keys += ["errors"]
        if operation.sized and not operation.messages and not setup.overlap:
            keys += ["algbw", "busbw"]
        self._keys = keys

    def head(self, setup: CollectivesSetup, ranks: int) -> str:
        """Return two lines: the title of the table and the column names."""
        operation = self._operation
        what = f" of {setup.dtype}" if operation.sized else ""
        what = f" ({setup.reduction}){what}" if operation.reduces else what
        among = "2 ranks" if operation.messages else counted(ranks, "rank")
        how = f", {WINDOW} messages at once" if operation.is_bandwidth else ""
        how += ", non-blocking, overlapped with computation" if setup.overlap else ""
        names = [f"{COLUMNS[key][0]:>{self._width(key)}}" for key in self._keys]
        first = "# Size" if operation.sized else "#"
        return f"# {operation.name}{what} among {among}{how}\n{first:<{_SIZE_WIDTH}}{''.join(names)}  Backend"

    def line(self, row: dict[str, Any]) -> str:
        """Return the line of the table for `row`."""
        cells = [f"{COLUMNS[key][1](row[key]):>{self._width(key)}}" for key in self._keys]
        size = str(row["size"]) if self._operation.sized else ""
        return f"{size:<{_SIZE_WIDTH}}{''.join(cells)}  {row['backend']}"

    @staticmethod
    def _width(key: str) -> int:
        return max(14, len(COLUMNS[key][0]) + 2)
