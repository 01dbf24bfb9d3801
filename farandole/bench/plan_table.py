"""The tables of `farandole plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from farandole.bench.planning import Planned
from farandole.data.wording import size
from farandole.memory.swap import BEHIND_BYTES
from farandole.plan import Plan
from farandole.planner import Estimate

COLUMNS = {
    "weights": ("weights",),
    "gradients": ("gradients", "reused"),
    "optimizer": ("optimizer",),
    "buffers": ("buffers",),
    "activations": ("activations",),
    "backward": ("backward",),
    "checkpoint": ("checkpoint",),
    "process": ("process", "allocator"),
}
"""The memory columns of the table; each column shows the sum of the listed parts of an estimate."""

_OF_PASSES = ("activations", "backward")
"""The columns that the planner does not estimate if the other parts alone exceed the memory."""

_MOST_LINES, _FEW = 40, 12
"""The table shows at most `_MOST_LINES` plans that fit, and at most `_FEW` plans that do not fit.

If no plan fits, it shows at most `_MOST_LINES` plans.  If it shows the best plan of each mesh, the first `_FEW` plans
are shown too.
"""

TOLERANCE = 0.1
"""The largest accepted error of a predicted peak, as a fraction of the measured peak."""


def column(estimate: Estimate, name: str) -> int:
    """Return the size in bytes that the table shows for `estimate` in column `name`."""
    return sum(estimate.parts[part] for part in COLUMNS[name])


def seconds(number: float) -> str:
    """Format a number of seconds: numbers of at least 10 as integers, other numbers with two significant digits."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def choices(estimates: Sequence[Estimate]) -> list[str]:
    """Return the names of the plan fields for which the table needs a column.

    These are the ZeRO stage, recomputation, and each field that differs from its default in at least one plan.  The
    precision is omitted if it is the same in all plans.
    """
    plans, default = [one.plan for one in estimates], Plan()
    axes = ("tensor", "sequence", "context", "expert", "pipeline", "schedule")
    seldom = (*axes, "data_shard", "precision", "rounding", "offload", "offloaded", "swap")
    wanted = [name for name in seldom if {getattr(one, name) for one in plans} != {getattr(default, name)}]
    if len({one.precision for one in plans}) == 1 and "precision" in wanted:
        wanted.remove("precision")
    return ["zero", "recompute", *wanted]


def word(plan: Plan, name: str) -> str:
    """Return the value of the field `name` as text; the schedule of a plan without a pipeline is "-"."""
    if name == "schedule" and plan.pipeline == 1:
        return "-"
    value = getattr(plan, name)
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def plans(planned: Planned) -> Group:
    """Return the table of plans, with a title and notes.

    The table shows the plans that fit and a few plans that do not fit.  If there are many plans and more than one mesh,
    the table instead shows the first plans and the best plan of each mesh.
    """
    memory = planned.machine.memory
    fitting = [one for one in planned.estimates if one.fits(memory)]
    others = planned.estimates[len(fitting) :]
    shown = [*fitting[:_MOST_LINES], *others[: _FEW if fitting else _MOST_LINES]]
    several = len({_mesh(one.plan) for one in planned.estimates}) > 1
    if several and len(planned.estimates) > _MOST_LINES:
        shown = _by_mesh(planned.estimates)
    divisor, unit = _unit(max(one.peak for one in shown))
    names, table = choices(shown), _table()
    for name in names:
        table.add_column(name)
    with_stages = any(one.plan.pipeline > 1 for one in shown)
    of_stages = ("micro-batches", "idle") if with_stages else ()
    for name in (*COLUMNS, "peak", *of_stages, "s/step"):
        table.add_column(name, justify="right")
    table.add_column("outcome")
    for one in shown:
        cells = [word(one.plan, name) for name in names]
        cells += [
            _number(column(one, name), divisor) if one.complete or name not in _OF_PASSES else "?"
            for name in COLUMNS
        ]
        more = "" if one.complete else ">"
        cells.append(more + _number(one.peak, divisor))
        if with_stages:
            cells += [f"{one.micro_batches:,}", _idle(one)]
        cells.append(seconds(one.seconds) if one.complete else "?")
        style = None if one.fits(memory) else "dim"
        table.add_row(*cells, one.outcome(memory), style=style)
    lines: list[Any] = [planned.published] if planned.published else []
    lines += [
        f"Memory in {unit} of the rank with the largest peak; {size(memory)} per rank is available",
        table,
    ]
    if len(shown) < len(planned.estimates):
        of_meshes = "; the table shows the first plans and the best plan of each mesh" if several else ""
        lines.append(
            f"{len(planned.estimates)} plans were considered, and {len(fitting)} of them fit{of_meshes}"
        )
    if "swap" in names:
        lines.append(
            f"swap: the peak is the worst case, with up to {size(BEHIND_BYTES)} of activations waiting to be written"
        )
    return Group(*lines)


def _idle(one: Estimate) -> str:
    """Return the pipeline's idle time in percent, "-" without a pipeline, or "?" without an estimate."""
    if one.plan.pipeline == 1:
        return "-"
    return "?" if one.pipeline is None else f"{100 * one.pipeline.idle:.0f} %"


def _mesh(plan: Plan) -> tuple[int, ...]:
    return plan.tensor, plan.context, plan.expert, plan.pipeline


def _by_mesh(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the first `_FEW` estimates and the first estimate of each mesh, in order, but at most `_MOST_LINES`."""
    first: dict[tuple[int, ...], int] = {}
    for number, one in enumerate(estimates):
        first.setdefault(_mesh(one.plan), number)
    shown = {*range(min(_FEW, len(estimates))), *first.values()}
    return [estimates[number] for number in sorted(shown)[:_MOST_LINES]]


def checked(predicted: Mapping[int, Estimate], seen: Sequence[Mapping[str, Any]]) -> tuple[Group, bool]:
    """Compare the predicted memory of each rank with the measured memory.

    Args:
        predicted: maps ranks to estimates.  Ranks with the same estimate have adjacent columns in the table.
        seen: the measurements of each rank; the keys are the fields of `plan_check.Seen`.

    Returns:
        The table, and whether the predicted peaks of all ranks are within `TOLERANCE` of the measured peaks.
    """
    columns: dict[str, dict[str, float]] = {}
    errors: dict[str, float] = {}
    for number, estimate in enumerate({id(one): one for one in predicted.values()}.values()):
        columns[f"predicted {number}"] = _predicted(estimate)
        for rank in (rank for rank, one in predicted.items() if one is estimate):
            name = f"rank {rank}"
            columns[name] = _measured(seen[rank], estimate, len(seen))
            errors[name] = estimate.peak / columns[name]["peak"] - 1
    divisor, unit = _unit(max(column["peak"] for column in columns.values()))
    title, table = f"predicted and measured, {unit}", _table()
    table.add_column("part")
    for name in columns:
        table.add_column(name if name in errors else "predicted", justify="right")
    for part in next(iter(columns.values())):
        values = [column[part] for column in columns.values()]
        if part == "seconds":
            table.add_row(part, *(f"{value:.2f}" for value in values))
        elif part != "reused memory" or any(values):
            table.add_row(part, *(_number(value, divisor, least=0) for value in values))
    differences = [f"{100 * errors[name]:+.1f} %" if name in errors else "" for name in columns]
    table.add_row("peak, difference", *differences)
    return Group(title, table), all(abs(error) <= TOLERANCE for error in errors.values())


def _predicted(estimate: Estimate) -> dict[str, float]:
    """Return the predicted column of the comparison: bytes per memory category, and seconds per step."""
    parts = estimate.parts
    return {
        **{name: parts[name] for name in ("weights", "gradients", "optimizer")},
        "activations, backward": parts["activations"] + parts["backward"],
        "process": parts["process"],
        "reused memory": parts["reused"],
        "buffers, allocator": parts["buffers"] + parts["allocator"],
        "peak": estimate.peak,
        "seconds": estimate.seconds,
    }


def _measured(one: Mapping[str, Any], estimate: Estimate, ranks: int) -> dict[str, float]:
    """Return the measured column of the comparison: bytes per memory category, and seconds per step."""
    parts, libraries = one["parts"], one["libraries"] / ranks  # all ranks share the library pages
    found: dict[str, float] = {
        **{name: parts[name] for name in ("weights", "gradients", "optimizer")},
        "activations, backward": one["tensors"],
        "process": one["process"] + libraries,
        "reused memory": -min(parts["gradients"], one["tensors"]) if estimate.parts["reused"] else 0,
    }
    peak = max(one["start"], one["peak"]) + libraries
    return {
        **found,
        "buffers, allocator": peak - sum(found.values()),
        "peak": peak,
        "seconds": one["seconds"],
    }


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold")


def _unit(most: float) -> tuple[int, str]:
    return (1 << 30, "GiB") if most >= 10 << 30 else (1 << 20, "MiB")


def _number(count: float, divisor: int, least: float = 10) -> str:
    """Format `count` bytes in GiB or MiB; MiB values of at least `least` are rounded to integers, and 0 is "-"."""
    if count == 0:
        return "-"
    number = count / divisor
    if divisor == 1 << 20 and abs(number) >= least:
        return f"{number:,.0f}"
    return f"{number:,.2f}"
