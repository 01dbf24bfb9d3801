"""Measure a model with many equal blocks by extrapolating from smaller models.

The layers of a transformer have the same structure, so every quantity of a pass (activations, operations, transferred
bytes) is a linear function of the number of layers.  The value for all layers therefore follows from two small models:

    runs = find_runs(model)                                      # layers 3 to 60
    extrapolated(runs, measure)                                  # runs `measure` with 2 and with 3 of these layers

The smaller model has more than one layer, because quantities such as a peak are not linear with too few layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

LEAST = 2
"""The number of blocks of a run in the smallest model."""


@dataclass(frozen=True)
class Run:
    """Consecutive equal blocks in a container."""

    container: nn.Module
    names: tuple[str, ...]
    first: nn.Module


def find_runs(model: nn.Module) -> list[Run]:
    """Return the runs of equal blocks that are long enough for an extrapolation.

    A run is long enough if it has more blocks than the two smaller models together.
    """
    found: list[Run] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        inside: set[str] = set()
        if isinstance(module, nn.Sequential | nn.ModuleList):
            for run in _equal_children(module):
                found.append(run)
                inside.update(run.names)
        for name, child in module.named_children():
            if name not in inside:
                visit(child)

    visit(model)
    return found


def _equal_children(container: nn.Module) -> Iterator[Run]:
    names: list[str] = []
    before: Any = None
    for name, child in [*container.named_children(), ("", None)]:
        found = None if child is None else signature(child)
        if found != before:
            if len(names) > 2 * LEAST + 1:
                yield Run(container, tuple(names), container.get_submodule(names[0]))
            names, before = [], found
        names.append(name)


def signature(module: nn.Module) -> Any:
    """Return a key that is equal for modules that perform the same computation, even if their weights differ."""
    options = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | tuple)}
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for kind in (module._parameters, module._buffers)
        for name, tensor in kind.items()
        if tensor is not None
    ]
    wrappers = [type(each) for each in vars(module).get("_farandole_wrappers", ())]
    inner = [(name, signature(child)) for name, child in module.named_children()]
    return type(module), _plain(options), tensors, wrappers, inner


def _plain(value: Any) -> Any:
    """Return `value` with each tensor or module replaced by its type."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value)
    return type(value) if isinstance(value, Tensor | nn.Module) else value


def extrapolated(runs: Sequence[Run], measure: Callable[[], Mapping[Any, float]]) -> dict[Any, float]:
    """Return the result of `measure` for the complete model, extrapolated from results for smaller models.

    A key that is missing from a result counts as zero.
    """
    with shortened(dict.fromkeys(runs, LEAST)):
        base = dict(measure())
    result = dict(base)
    for run in runs:
        with shortened({each: LEAST + (each is run) for each in runs}):
            more = measure()
        for key in base.keys() | more.keys():
            slope = more.get(key, 0) - base.get(key, 0)
            result[key] = result.get(key, 0) + (len(run.names) - LEAST) * slope
    return result


@contextmanager
def shortened(lengths: Mapping[Run, int]) -> Iterator[None]:
    """Return a context manager that limits each run to its first `lengths[run]` blocks."""
    dropped: dict[nn.Module, set[str]] = defaultdict(set)
    for run, length in lengths.items():
        dropped[run.container].update(run.names[length:])
    before = [(container, dict(container._modules)) for container in dropped]
    try:
        for container, children in before:
            kept = {name: child for name, child in children.items() if name not in dropped[container]}
            if all(name.isdigit() for name in kept):  # a ModuleList finds its members by number
                kept = {str(number): child for number, child in enumerate(kept.values())}
            _replace(container, kept)
        yield
    finally:
        for container, children in before:
            _replace(container, children)


def _replace(container: nn.Module, children: Mapping[str, nn.Module | None]) -> None:
    container._modules.clear()
    container._modules.update(children)
