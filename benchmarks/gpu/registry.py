"""The checks: functions that compare a path of the package with something else, and return figures."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AREAS = (
    "routing",
    "collectives",
    "zero",
    "offload",
    "precision",
    "memory",
    "planner",
    "checkpoints",
)
"""The modules of `checks/`, in the order in which they run."""

Figures = dict[str, tuple[float, str]]
"""Measured numbers with their units, by name."""


class Skip(Exception):
    """The check cannot run here; the message says why."""


@dataclass(frozen=True)
class Context:
    """The arguments of a check: its runtime, the device under test, and an empty folder that all ranks share."""

    runtime: Any
    device: Any
    folder: Path

    @property
    def comm(self) -> Any:
        """The communicator of all ranks."""
        return self.runtime.comm

    @property
    def on_cuda(self) -> bool:
        """Whether the device under test is a GPU."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has finished its kernels."""
        if self.on_cuda:
            import torch

            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Check:
    """One check: a function and the conditions under which it runs."""

    name: str
    area: str
    what: str
    run: Callable[[Context], Figures]
    ranks: int
    on_cpu: bool
    deadline_s: float
    needs: tuple[str, ...]

    def missing(self) -> list[str]:
        """Return the modules that the check needs and this environment lacks."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


_checks: dict[str, Check] = {}


def check(
    *, ranks: int = 1, on_cpu: bool = True, deadline_s: float = 60.0, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Context], Figures]], Callable[[Context], Figures]]:
    """Register a function of `checks/AREA.py` as the check `AREA.NAME`.

    Args:
        ranks: Processes that run the check together, on one device.
        on_cpu: Whether the check makes sense with `--device cpu`.
        deadline_s: Seconds after which the processes are killed.
        needs: Modules without which the check is skipped.
    """

    def register(function: Callable[[Context], Figures]) -> Callable[[Context], Figures]:
        area = function.__module__.rpartition(".")[2]
        name = f"{area}.{function.__name__}"
        what = (function.__doc__ or "").strip().splitlines()[0]
        _checks[name] = Check(name, area, what, function, ranks, on_cpu, deadline_s, needs)
        return function

    return register


def checks(areas: Iterable[str] = AREAS) -> dict[str, Check]:
    """Return the checks of some areas by name, area by area."""
    asked = set(areas)
    wanted = [area for area in AREAS if area in asked]
    for area in wanted:
        importlib.import_module(f"benchmarks.gpu.checks.{area}")
    return {name: each for area in wanted for name, each in _checks.items() if each.area == area}


def select(only: list[str]) -> list[Check]:
    """Return the checks that `only` names, by their name or area; all without names.

    Raises:
        ValueError: A name is unknown.
    """
    known = checks()
    unknown = [name for name in only if name not in known and name not in AREAS]
    if unknown:
        raise ValueError(f"--only {unknown[0]}: expected one of {', '.join([*AREAS, *known])}")
    return [each for name, each in known.items() if not only or name in only or each.area in only]
