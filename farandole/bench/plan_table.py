"""The tables of `farandole plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from farandole.bench.planning import Planned
from farandole.data.wording import size
from farandole.memory.estimate import Estimate
from farandole.memory.estimate.formulas import activation_bytes, state_bytes
from farandole.models.attention import LONGEST_EXPLICIT

COLUMNS = {
    "weights": ("parameters",),
    "gradients": ("gradients", "taken over"),
    "optimizer": ("optimizer",),
    "buffers": ("communication",),
    "activations": ("activations",),
    "backward": ("transient",),
    "checkpoint": ("checkpoint",),
    "process": ("process", "allocator"),
}
"""What is shown together, by the parts of an estimate."""

TOLERANCE = 0.1
"""The part of a measured peak by which a prediction may differ."""


def column(estimate: Estimate, name: str) -> int:
    """Bytes of a column."""
    return sum(estimate.parts[part] for part in COLUMNS[name])


def seconds(number: float) -> str:
    """Two digits, or all before the point."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def plans(planned: Planned) -> Group:
    """A line for each plan."""
    divisor, unit = _unit(max(one.peak for one in planned.estimates))
    memory = planned.machine.memory
    title, table = f"{unit} of the rank that needs most, of {size(memory)}", _table()
    precisions = len({one.plan.precision for one in planned.estimates}) > 1
    for name in ("zero", "recompute", "offload", *(["precision"] if precisions else [])):
        table.add_column(name)
    for name in (*COLUMNS, "peak", "s/step"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for one in planned.estimates:
        words = [str(one.plan.zero), one.plan.recompute, one.plan.offload]
        words += [one.plan.precision] if precisions else []
        numbers = [*(column(one, name) for name in COLUMNS), one.peak]
        shown = [_number(number, divisor) for number in numbers]
        style = None if one.fits(memory) else "dim"
        table.add_row(*words, *shown, seconds(one.seconds), one.verdict(memory), style=style)
    return Group(title, table)


def formulas(planned: Planned) -> Group:
    """What the closed formulas say of the same, with weights of the plan's precision."""
    model, first = planned.config.model, planned.estimates[0]
    low = 4 if first.plan.precision == "fp32" else 2
    _, samples = planned.config.micro_batches(planned.ranks)
    fused = low == 4 or model.context > LONGEST_EXPLICIT or not planned.machine.host
    activations = activation_bytes(
        model.context, samples, model.width, model.layers, model.heads, low, fused_attention=fused
    )
    divisor, unit = _unit(first.peak)
    title, table = f"closed formulas, {low}-byte weights and an fp32 master, {unit}", _table()
    for name in ("zero", "weights", "gradients", "optimizer", "activations"):
        table.add_column(name, justify="left" if name == "zero" else "right")
    for zero in sorted({one.plan.zero for one in planned.estimates}):
        states = state_bytes(model.gpt().parameters, zero, planned.ranks, low)
        row = [states["parameters"], states["gradients"], states["optimizer"], activations]
        table.add_row(str(zero), *(_number(number, divisor) for number in row))
    return Group(title, table)


def checked(predicted: Estimate, seen: Sequence[dict[str, Any]]) -> tuple[Group, bool]:
    """Predicted beside measured on every rank, and whether all peaks are within the tolerance."""
    ranks = len(seen)
    parts = predicted.parts
    rows: dict[str, tuple[float, list[float]]] = {
        name: (parts[name], [one["parts"][name] for one in seen])
        for name in ("parameters", "gradients", "optimizer")
    }
    rows["activations, backward"] = (
        parts["activations"] + parts["transient"],
        [one["tensors"] for one in seen],
    )
    rows["process"] = (parts["process"], [one["process"] + one["libraries"] / ranks for one in seen])
    peaks = [max(one["start"], one["peak"]) + one["libraries"] / ranks for one in seen]
    if parts["taken over"]:
        rows["not at once"] = (
            parts["taken over"],
            [-min(one["parts"]["gradients"], one["tensors"]) for one in seen],
        )
    others = sum(measured[0] for _, measured in rows.values())
    rows["buffers, allocator"] = (
        parts["communication"] + parts["allocator"],
        [peak - sum(m[rank] for _, m in rows.values()) for rank, peak in enumerate(peaks)],
    )
    rows["peak"] = (predicted.peak, peaks)
    divisor, unit = _unit(max(predicted.peak, others))
    title, table = f"predicted and measured, {unit}", _table()
    table.add_column("part")
    for name in ("predicted", *(f"rank {rank}" for rank in range(ranks))):
        table.add_column(name, justify="right")
    for name, (wanted, found) in rows.items():
        table.add_row(name, _number(wanted, divisor), *(_number(value, divisor) for value in found))
    table.add_row("seconds", f"{predicted.seconds:.2f}", *(f"{one['seconds']:.2f}" for one in seen))
    errors = [predicted.peak / peak - 1 for peak in peaks]
    table.add_row("peak, difference", "", *(f"{100 * error:+.1f} %" for error in errors))
    return Group(title, table), all(abs(error) <= TOLERANCE for error in errors)


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold")


def _unit(most: float) -> tuple[int, str]:
    return (1 << 30, "GiB") if most >= 10 << 30 else (1 << 20, "MiB")


def _number(count: float, divisor: int) -> str:
    if count == 0:
        return "-"
    return f"{count / divisor:,.2f}" if divisor > 1 << 20 else f"{count / divisor:,.0f}"
