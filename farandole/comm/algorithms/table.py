"""Measured times of the algorithms, and predictions for other sizes and numbers of hosts.

For a measured number of hosts, times between two measured sizes are interpolated linearly.  For other numbers of hosts,
the cost model of each algorithm predicts the time.  The latency and the seconds per byte are fitted to all measurements
of the link.

All hosts in a group must choose the same algorithm.  This module therefore uses only operations whose results are
bitwise equal on all machines: + - * / and sums that are rounded only once (`math.fsum`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any

from farandole.comm.algorithms import doubling, rabenseifner, ring

VERSION = 1

Cost = Callable[[int, int, float, float], float]
"""A cost model of an algorithm: `cost(ranks, size, latency_s, seconds_per_byte)` returns the time in seconds."""

COSTS: dict[str, Cost] = {
    "ring": ring.all_reduce_cost,
    "doubling": doubling.all_reduce_cost,
    "rabenseifner": rabenseifner.all_reduce_cost,
}


class TableError(ValueError):
    """Raised if a table of measurements is invalid or cannot be read; the message names the file and the problem."""


@dataclass(frozen=True)
class Fit:
    """The parameters of the cost models: the latency of a message, and the time per byte."""

    latency_s: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Link:
    """Measurements for one type of link.

    Args:
        name: the name of the link.
        seconds: `seconds[hosts][size][algorithm]` is the time in seconds of an all-reduce of `size` bytes between
            `hosts` hosts, with one rank per host.
        measured: a description of the measurement.
        leaders: `leaders[size][count]` is the time in seconds of an all-reduce of `size` bytes among all ranks of all
            hosts, with `count` leaders per host.  These times are only for information.
    """

    name: str
    seconds: dict[int, dict[int, dict[str, float]]]
    measured: dict[str, Any] = field(default_factory=dict)
    leaders: dict[int, dict[int, float]] = field(default_factory=dict)

    @cached_property
    def fit(self) -> Fit:
        """Return the latency and the time per byte that best fit the measurements of this link."""
        return fit(
            [
                (COSTS[name], hosts, size, seconds)
                for hosts, sizes in self.seconds.items()
                for size, times in sizes.items()
                for name, seconds in times.items()
            ]
        )

    @property
    def measured_algorithms(self) -> set[str]:
        """Return the names of the measured algorithms."""
        return {name for sizes in self.seconds.values() for times in sizes.values() for name in times}

    def predict(self, algorithm: str, hosts: int, size: int) -> float:
        """Return the time in seconds of an all-reduce of `size` bytes among `hosts` hosts.

        If this number of hosts has been measured, the time follows from the measurements: it is interpolated between
        sizes, and extrapolated by the cost model above the largest size.  Otherwise, the cost model predicts the time.
        """
        points = sorted(
            (at, times[algorithm]) for at, times in self.seconds.get(hosts, {}).items() if algorithm in times
        )
        if not points:
            return self.model(algorithm, hosts, size)
        (last, most) = points[-1]
        if size >= last:  # extrapolate the time for the largest measured size with the cost model
            return most * (self.model(algorithm, hosts, size) / self.model(algorithm, hosts, last))
        below = points[0]
        for above in points:
            if size <= above[0]:
                break
            below = above
        if below[0] == above[0]:
            return below[1]
        return below[1] + (above[1] - below[1]) * ((size - below[0]) / (above[0] - below[0]))

    def model(self, algorithm: str, hosts: int, size: int) -> float:
        """Return the time in seconds that the cost model predicts for `size` bytes among `hosts` hosts."""
        return COSTS[algorithm](hosts, size, self.fit.latency_s, self.fit.seconds_per_byte)

    def without(self, hosts: int) -> Link | None:
        """Return a copy without the measurements for `hosts` hosts, or None if no measurements remain."""
        rest = {count: sizes for count, sizes in self.seconds.items() if count != hosts}
        return Link(self.name, rest) if rest else None


@dataclass(frozen=True)
class Table:
    """Measurements for one or more types of links."""

    links: tuple[Link, ...]

    def best(self, hosts: int, size: int) -> str:
        """Return the algorithm to use for an all-reduce of `size` bytes among `hosts` hosts.

        The link between the hosts is unknown.  On each link, the slowdown of an algorithm is its time divided by the
        time of the fastest algorithm.  The result is the algorithm with the smallest worst-case slowdown over all
        links.
        """
        worst = dict.fromkeys(COSTS, 0.0)
        for link in self.links:
            times = {name: link.predict(name, hosts, size) for name in COSTS}
            least = min(times.values())
            worst = {name: max(worst[name], seconds / least) for name, seconds in times.items()}
        return min(worst, key=lambda name: worst[name])

    def dump(self) -> str:
        """Return the table as JSON."""
        links = [
            {
                "name": link.name,
                "measured": link.measured,
                "fit": vars(link.fit),
                "seconds": link.seconds,
                "leaders": link.leaders,
            }
            for link in self.links
        ]
        return json.dumps({"version": VERSION, "links": links}, indent=1) + "\n"

    @staticmethod
    def parse(text: str, name: str) -> Table:
        """Parse a table from JSON.

        Raises:
            TableError: if the table is invalid; the message begins with `name`.
        """
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                raise TableError(
                    f"{name}: expected table version {VERSION}, got version {content['version']}; create the table "
                    f"again with farandole tune"
                )
            links = tuple(_link(each) for each in content["links"])
        except TableError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TableError(
                f"{name}: expected a table written by farandole tune ({type(error).__name__}: {error}); create the "
                "table again with farandole tune"
            ) from error
        if not links:
            raise TableError(
                f"{name}: expected measurements of a link, got none; create the table again with farandole tune"
            )
        for link in links:
            if missing := sorted(COSTS.keys() - link.measured_algorithms):
                raise TableError(
                    f"{name}: expected measurements for {', '.join(COSTS)}, got none for {', '.join(missing)} (link "
                    f"{link.name}); create the table again with farandole tune"
                )
        return Table(links)

    @staticmethod
    def read(path: str) -> Table:
        """Read a table from a file; raise `TableError` if the file cannot be read or is invalid."""
        try:
            with open(path) as file:
                return Table.parse(file.read(), path)
        except OSError as error:
            raise TableError(
                f"cannot read table={path!r}: {error.strerror or error}; check the path"
            ) from error

    @staticmethod
    def default() -> Table:
        """Return the table that is part of this package."""
        name = "table.json"
        return Table.parse((resources.files("farandole.comm.algorithms") / name).read_text(), name)


def fit(points: list[tuple[Cost, int, int, float]]) -> Fit:
    """Fit the latency and the time per byte to measurements by least squares.

    The fit minimizes the sum of squared relative errors; absolute errors would give most weight to large sizes.  Both
    results are non-negative.

    Args:
        points: a tuple (cost model, number of ranks, size in bytes, measured seconds) for each measurement.
    """
    # each point gives a linear equation a * latency + b * seconds_per_byte = seconds, here divided by seconds
    rows = [(cost(n, size, 1.0, 0.0) / t, cost(n, size, 0.0, 1.0) / t) for cost, n, size, t in points]
    aa, ab, bb = (math.fsum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = math.fsum(row[0] for row in rows), math.fsum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        latency, per_byte = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if latency >= 0 and per_byte >= 0:
            return Fit(latency, per_byte)
    alone = [Fit(a / aa, 0.0)] + ([Fit(0.0, b / bb)] if bb > 0 else [])
    return min(alone, key=lambda each: _error(each, rows))


def _error(each: Fit, rows: list[tuple[float, float]]) -> float:
    return math.fsum((1 - a * each.latency_s - b * each.seconds_per_byte) ** 2 for a, b in rows)


def _link(content: Mapping[str, Any]) -> Link:
    seconds = {
        int(hosts): {
            int(size): {name: _time(seconds) for name, seconds in times.items() if name in COSTS}
            for size, times in sizes.items()
        }
        for hosts, sizes in content["seconds"].items()
    }
    if any(hosts < 2 for hosts in seconds):
        raise ValueError(
            f"expected each measurement to use 2 or more hosts, got {min(seconds)}; measure on more hosts"
        )
    leaders = {
        int(size): {int(count): _time(each) for count, each in times.items()}
        for size, times in content.get("leaders", {}).items()
    }
    return Link(str(content["name"]), seconds, dict(content.get("measured", {})), leaders)


def _time(seconds: Any) -> float:
    if not isinstance(seconds, float | int) or not 0 < seconds < math.inf:
        raise ValueError(f"expected a finite, positive number of seconds, got {seconds!r}")
    return float(seconds)
