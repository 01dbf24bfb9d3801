"""Register checks: functions that compare a code path of the package with a reference, and return figures."""

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
"""Measured values with their units, by name."""


class Skip(Exception):
    """Raised if a check cannot run on this machine; the message states the reason."""


@dataclass(frozen=True)
class Context:
    """The arguments of a check: the runtime, the device under test, and an empty folder that all ranks share."""

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
        """Wait until all kernels on the device have finished."""
        if self.on_cuda:
            import torch

            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Check:
    """A check: its function, and the conditions under which the function runs."""

    name: str
    area: str
    what: str
    run: Callable[[Context], Figures]
    ranks: int
    on_cpu: bool
    deadline_s: float
    needs: tuple[str, ...]

    def missing(self) -> list[str]:
        """Return the required modules that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


_checks: dict[str, Check] = {}


def check(
    *, ranks: int = 1, on_cpu: bool = True, deadline_s: float = 60.0, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Context], Figures]], Callable[[Context], Figures]]:
    """Register a function of `checks/AREA.py` as the check `AREA.NAME`.

    Args:
        ranks: The number of processes that run the check together, on one device.
        on_cpu: Whether the check also runs with `--device cpu`.
        deadline_s: The number of seconds after which the processes are killed.
        needs: The modules without which the check is skipped.
    """

    def register(function: Callable[[Context], Figures]) -> Callable[[Context], Figures]:
        area = function.__module__.rpartition(".")[2]
        name = f"{area}.{function.__name__}"
        what = (function.__doc__ or "").strip().splitlines()[0]
        _checks[name] = Check(name, area, what, function, ranks, on_cpu, deadline_s, needs)
        return function

    return register


def checks(areas: Iterable[str] = AREAS) -> dict[str, Check]:
    """Return the checks in `areas` by name, ordered by area."""
    asked = set(areas)
    wanted = [area for area in AREAS if area in asked]
    for area in wanted:
        importlib.import_module(f"benchmarks.gpu.checks.{area}")
    return {name: each for area in wanted for name, each in _checks.items() if each.area == area}


def select(only: list[str]) -> list[Check]:
    """Return the checks whose name or area is in `only`; if `only` is empty, return all checks.

    Raises:
        ValueError: `only` contains an unknown name.
    """
    known = checks()
    unknown = [name for name in only if name not in known and name not in AREAS]
    if unknown:
        raise ValueError(f"--only: expected one of {', '.join([*AREAS, *known])}, got {unknown[0]}")
    return [each for name, each in known.items() if not only or name in only or each.area in only]
