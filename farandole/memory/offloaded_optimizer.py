"""A wrapper for torch optimizers that keeps their state in host memory or on a disk.

A step streams the state through a few buffers, one unit of the model at a time.

References: Ren et al., 2021, "ZeRO-Offload"; Rajbhandari et al., 2021, "ZeRO-Infinity".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farandole.data.wording import counted
from farandole.memory.disk import Bandwidth, Budget, OffloadError
from farandole.memory.divided_step import divided_step
from farandole.memory.record_stream import RecordStream

_ALIGNMENT = 64
"""The alignment in bytes: every tensor in a record starts on a cache line."""

_PROBE_ELEMENTS = 3
"""The number of elements of an example shard.

One step on the example shard determines the names and dtypes of the optimizer's state.
"""

_IN_RECORD = object()
"""The value in `OffloadedOptimizer._kept` for a tensor that is stored in the record."""


@dataclass(frozen=True)
class ShardState:
    """The weights and the optimizer state of one shard.

    `state` maps the name of each state to a tensor of the shard's length or to a single number.  `state` is empty
    before the shard's first step.
    """

    weights: Tensor
    state: dict[str, Any]


class OffloadedOptimizer:
    """Offloads the state of an elementwise `torch.optim.Optimizer`, and steps one unit of parameters at a time.

    The results are bitwise identical to the results of `optimizer.step()`.  Existing values and state are
    preserved.  Schedulers change `optimizer.param_groups` as usual.  The optimizer's step hooks are not called.
    Parameter groups that set none of `fused`, `foreach` and `differentiable` use `fused=True`.

    Args:
        units: the optimizer's parameters, partitioned into units.  The parameters are called shards, and must be
            1-D, floating point and on the CPU.  Each unit is stored in one record.
        open_stream: a function that takes the record sizes in bytes and returns a stream, such as `host_records` or
            `partial(disk_records, folder)`.
        weights: whether the records also contain the shards' values.  If so, the shards are NaN and use no memory
            between steps, and the model must compute with separate copies.  Gradients can be set at any time.

    Raises:
        OffloadError: if the optimizer's state is neither one number per element nor one number per shard, or if there
            is no space for the records.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[Sequence[nn.Parameter]],
        open_stream: Callable[[Sequence[int]], RecordStream],
        weights: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.units = [list(unit) for unit in units]
        self.weights = weights
        self._group_of = _check(optimizer, self.units)
        for group in optimizer.param_groups:
            _prefer_fused(group)
        kinds = {(index, shard.dtype) for shard, index in self._group_of.items()}
        kept = {kind: _elementwise_state(optimizer, *kind) for kind in kinds}
        self._places: list[list[_ShardLayout]] = []
        sizes = []
        for unit in self.units:
            places, nbytes = _lay_out(
                unit, [kept[self._group_of[shard], shard.dtype] for shard in unit], weights
            )
            self._places.append(places)
            sizes.append(nbytes)
        self._kept: dict[Tensor, dict[str, Any]] = {}
        self._broken: set[int] = set()
        self.stream = open_stream(sizes)
        try:
            self._load_records()
        except BaseException:
            self.stream.close()
            raise

    def step(
        self, before: Callable[[int], None] | None = None, after: Callable[[int], None] | None = None
    ) -> None:
        """Step every unit.  Shards whose `grad` is None do not change.

        If a step is interrupted after some units have been stepped, further steps raise `OffloadError` until every
        unit has been loaded with `load`.

        Args:
            before: called with the index of each unit before its step, for example to set its gradients.  Without
                `before`, units without gradients are skipped.
            after: called with the index of each unit after its step, for example to copy its values to the model.
        """
        if self._broken:
            raise OffloadError(
                "cannot step: the last step or load was interrupted between units; load "
                f"{counted(len(self._broken), 'unit')} from a checkpoint first, starting with unit {min(self._broken)}"
            )
        order = [
            index
            for index, unit in enumerate(self.units)
            if unit and (before is not None or any(shard.grad is not None for shard in unit))
        ]
        changed: dict[int, dict[str, Any]] = {}

        with divided_step(self.optimizer) as step_part:

            def work(index: int, record: Tensor) -> None:
                self._step_unit(index, record, step_part, changed, before, after)

            self.stream.update(order, work)
        for index, group in changed.items():  # an optimizer may count steps in its groups
            self.optimizer.param_groups[index].update(group)
        self._broken = set()

    def kept(self, unit: int) -> list[dict[str, Any]]:
        """Return a description of the state of each shard of `unit`, without reading the record.

        Each dict maps the name of a state to its dtype if the state has one number per element, and to its value
        otherwise.
        """
        return [
            {
                key: places.state[key].dtype if value is _IN_RECORD else value
                for key, value in self._kept.get(shard, {}).items()
            }
            for shard, places in zip(self.units[unit], self._places[unit], strict=True)
        ]

    def elementwise(self, unit: int) -> list[Collection[str]]:
        """Return, for each shard of `unit`, the names of the states with one number per element."""
        return [places.state.keys() for places in self._places[unit]]

    def saved(self, first: int = 0) -> Iterator[tuple[int, list[ShardState]]]:
        """Yield the index and the shard states of each unit, beginning with unit `first`.

        The states are valid until the next iteration.
        """
        for index, record in self.stream.visit(range(first, len(self.units))):
            yield index, [self._shard_state(index, at, record) for at in range(len(self.units[index]))]

    def check(self, unit: int, shards: Sequence[ShardState]) -> None:
        """Check that `shards` match `unit` in number, shape and dtype.

        Raises:
            ValueError: if `shards` do not match.
            IndexError: if `unit` is invalid.
        """
        if not 0 <= unit < len(self.units):
            raise IndexError(
                f"unit {unit} does not exist: there are {counted(len(self.units), 'unit')}, numbered from 0"
            )
        if len(shards) != len(self.units[unit]):
            raise ValueError(
                f"expected {counted(len(self.units[unit]), 'shard')} for unit {unit}, got {len(shards)}"
            )
        for at, shard in enumerate(shards):
            _check_fits(f"unit {unit}, shard {at}", self._places[unit][at], self.units[unit][at], shard)

    def load(self, unit: int, shards: Sequence[ShardState]) -> None:
        """Load `shards`, as yielded by `saved`, into `unit`.

        Raises:
            ValueError: if `shards` do not match `unit` in number, shape and dtype.
            IndexError: if `unit` is invalid.
        """
        self.check(unit, shards)
        own = [ShardState(shard.weights, _own_numbers(shard.state)) for shard in shards]
        self.stream.fill([unit], lambda _, record: self._fill(unit, record, own))
        self._broken.discard(unit)

    def invalidate(self) -> None:
        """Make `step` raise `OffloadError` until every unit has been loaded with `load`."""
        self._broken = set(range(len(self.units)))

    def budget(self, bandwidth: Bandwidth | None = None) -> Budget:
        """Return the numbers of bytes that one step reads and writes.

        If `bandwidth` is given, the result also contains the I/O time of a step.
        """
        nbytes = sum(self.stream.record_bytes)
        return Budget(nbytes, nbytes, bandwidth)

    def close(self) -> None:
        """Free the records, including all values and states in them.  Further calls have no effect."""
        self.stream.close()

    def _load_records(self) -> None:
        """Move the shards' values and states into the records."""

        def work(index: int, record: Tensor) -> None:
            unit = self.units[index]
            states = [ShardState(shard.data, dict(self.optimizer.state.get(shard, {}))) for shard in unit]
            self._fill(index, record, states)

        self.stream.fill(range(len(self.units)), work)
        self.stream.flush()
        for unit in self.units:
            for shard in unit:
                self.optimizer.state.pop(shard, None)
                self._drop_values(shard)

    def _fill(self, index: int, record: Tensor, shards: Sequence[ShardState]) -> None:
        for shard, places, given in zip(self.units[index], self._places[index], shards, strict=True):
            values = shard.data if places.weights is None else places.weights.of(record)
            if values.data_ptr() != given.weights.data_ptr():
                values.copy_(given.weights)
            self._keep(shard, places, record, given.state)

    def _keep(self, shard: nn.Parameter, places: _ShardLayout, record: Tensor, state: dict[str, Any]) -> None:
        """Store elementwise state in the record, and other state in memory."""
        kept: dict[str, Any] = {}
        name = type(self.optimizer).__name__
        for key, value in state.items():
            if key in places.state and value is not None:
                view = places.state[key].of(record)
                # true in a shard's first step, or if the optimizer creates a new tensor in each step
                if value.data_ptr() != view.data_ptr():
                    _check_element_state(name, key, value, view)
                    view.copy_(value)
                kept[key] = _IN_RECORD
            else:
                _check_shard_state(name, key, value)
                kept[key] = value
        if kept:
            self._kept[shard] = kept
        else:
            self._kept.pop(shard, None)

    def _state(self, shard: nn.Parameter, places: _ShardLayout, record: Tensor) -> dict[str, Any]:
        return {
            key: places.state[key].of(record) if value is _IN_RECORD else value
            for key, value in self._kept.get(shard, {}).items()
        }

    def _shard_state(self, index: int, at: int, record: Tensor) -> ShardState:
        shard, places = self.units[index][at], self._places[index][at]
        values = shard.data if places.weights is None else places.weights.of(record)
        return ShardState(values, self._state(shard, places, record))

    def _drop_values(self, shard: nn.Parameter) -> None:
        if self.weights:
            shard.data = shard.new_full((1,), torch.nan).expand(shard.shape)

    def _step_unit(
        self,
        index: int,
        record: Tensor,
        step_part: Callable[[], None],
        changed: dict[int, dict[str, Any]],
        before: Callable[[int], None] | None,
        after: Callable[[int], None] | None,
    ) -> None:
        unit, places = self.units[index], self._places[index]
        try:
            for shard, place in zip(unit, places, strict=True):
                if place.weights is not None:
                    shard.data = place.weights.of(record)
            if before is not None:
                before(index)
            # A shard has no state before its first step, and torch's fused SGD requires the same state for all shards
            # of a group.
            groups: dict[tuple[int, bool], dict[str, Any]] = {}
            for shard in unit:
                number = self._group_of[shard]
                group = {**self.optimizer.param_groups[number], "params": []}
                groups.setdefault((number, shard in self._kept), group)["params"].append(shard)
            pairs = list(zip(unit, places, strict=True))
            state: dict[Tensor, dict[str, Any]] = {
                p: held for p, place in pairs if (held := self._state(p, place, record))
            }
            self._broken = set(range(len(self.units)))  # until all units are stepped
            with _restricted_to(self.optimizer, [groups[key] for key in sorted(groups)], state):
                step_part()
                for shard, place in pairs:
                    self._keep(shard, place, record, self.optimizer.state.get(shard, {}))
            for (number, _), group in groups.items():
                changed[number] = {key: value for key, value in group.items() if key != "params"}
            if after is not None:
                after(index)
        finally:
            for shard in unit:
                self._drop_values(shard)


class UnitReader:
    """Reads the states of `optimizer` unit by unit between two steps, and prefetches the next units."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer
        self._visit: Iterator[tuple[int, list[ShardState]]] | None = None
        self._unit = -1
        self._states: list[ShardState] = []

    def states(self, unit: int) -> list[ShardState]:
        """Return the states of the shards of `unit`.

        The states are valid until the next call to `states` or `close`.
        """
        if unit != self._unit:
            if self._visit is None or unit != self._unit + 1:
                self.close()
                self._visit = self._optimizer.saved(unit)
            self._unit, self._states = next(self._visit)
        return self._states

    def close(self) -> None:
        """Release the buffer of the last unit read.  `states` can still be called afterwards."""
        if self._visit is not None:
            self._visit.close()  # type: ignore[attr-defined]
        self._visit, self._unit, self._states = None, -1, []


# ---- record layout ----


@dataclass(frozen=True)
class _Place:
    """The location of a 1-D tensor in a record."""

    start: int
    numel: int
    dtype: torch.dtype

    def of(self, record: Tensor) -> Tensor:
        """Return the tensor at this location, as a view of `record` (1-D, uint8)."""
        return record[self.start : self.start + self.numel * self.dtype.itemsize].view(self.dtype)


@dataclass(frozen=True)
class _ShardLayout:
    """The locations of a shard's weights (None if kept in memory) and states in a record."""

    weights: _Place | None
    state: Mapping[str, _Place]


def _lay_out(
    shards: Sequence[nn.Parameter], kept: Sequence[Mapping[str, torch.dtype]], weights: bool
) -> tuple[list[_ShardLayout], int]:
    """Return the layout of each shard in a record, and the record size in bytes."""
    end = 0

    def place(numel: int, dtype: torch.dtype) -> _Place:
        nonlocal end
        start, end = end, end + -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return _Place(start, numel, dtype)

    places = []
    for shard, names in zip(shards, kept, strict=True):
        own = place(shard.numel(), shard.dtype) if weights else None
        places.append(_ShardLayout(own, {name: place(shard.numel(), names[name]) for name in names}))
    return places, end


@contextmanager
def _restricted_to(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]]
) -> Iterator[None]:
    """Restrict `optimizer` to `groups` and their `state` within the context."""
    kept = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = groups, defaultdict(dict, state)
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = kept


def _elementwise_state(optimizer: Optimizer, index: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the name and dtype of each elementwise state, for shards of dtype `dtype` in group `index`."""
    group = optimizer.param_groups[index]
    shards = [shard for shard in group["params"] if shard.dtype == dtype and optimizer.state.get(shard)]
    name = type(optimizer).__name__
    if shards:
        shard = max(shards, key=torch.Tensor.numel)
        found = optimizer.state[shard]
    else:
        shard = nn.Parameter(torch.zeros(_PROBE_ELEMENTS, dtype=dtype, device="cpu"))
        shard.grad = torch.zeros_like(shard)
        with _restricted_to(optimizer, [{**group, "params": [shard]}], {}):
            try:
                with divided_step(optimizer, keep=False) as step_part:
                    step_part()
            except Exception as error:
                raise OffloadError(
                    f"{name} cannot update one flattened shard at a time ({type(error).__name__}: {error}); use an elementwise "
                    f"optimizer, such as AdamW, Adam or SGD"
                ) from error
            found = optimizer.state[shard]
    tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    for key, value in tensors.items():
        if value.shape != shard.shape and value.numel() != 1:
            raise OffloadError(
                f"{name} keeps {key!r} of shape {tuple(value.shape)} for a shard of {shard.numel()} elements, but "
                "a record can only store one number per element or per shard; use an optimizer such as AdamW, "
                "Adam or SGD"
            )
    return {key: value.dtype for key, value in tensors.items() if value.shape == shard.shape}


# ---- checks ----


def _check(optimizer: Optimizer, units: list[list[nn.Parameter]]) -> dict[Tensor, int]:
    """Check that `units` partition the optimizer's parameters; return each parameter's group index."""
    group_of = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    left = set(group_of)
    for index, unit in enumerate(units):
        for at, shard in enumerate(unit):
            if shard not in left:
                why = "occurs twice" if shard in group_of else f"is not in the {type(optimizer).__name__}"
                raise ValueError(
                    f"unit {index}, shard {at} {why}: units must contain each parameter of the optimizer exactly once, "
                    "and no others"
                )
            left.discard(shard)
            if shard.dim() != 1 or not shard.is_floating_point() or shard.device.type != "cpu":
                raise ValueError(
                    f"unit {index}, shard {at}: expected a 1-D floating-point parameter on the CPU, such as a "
                    f"flattened fp32 copy, got {tuple(shard.shape)} {shard.dtype} on {shard.device}"
                )
    if left:
        raise ValueError(
            f"found {counted(len(left), 'optimizer parameter')} outside all units: add every parameter to a unit"
        )
    return group_of


def _prefer_fused(group: dict[str, Any]) -> None:
    if (
        "fused" in group
        and group["fused"] is None
        and not group.get("foreach")
        and not group.get("differentiable")
    ):
        group["fused"] = True


def _own_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """Copy the single-element tensors in `state`, because a step changes these tensors in place."""
    return {k: v.clone() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in state.items()}


def _check_fits(what: str, places: _ShardLayout, shard: nn.Parameter, given: ShardState) -> None:
    per_element = {name: given.state[name] for name in places.state if given.state.get(name) is not None}
    for name, value in {"weights": given.weights, **per_element}.items():
        if not isinstance(value, Tensor) or value.shape != shard.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{what}: expected {name} with the shard's shape {tuple(shard.shape)}, got {found}; load the state of "
                "the same model"
            )
    for name, value in per_element.items():
        if value.dtype != places.state[name].dtype:
            raise ValueError(
                f"{what}: expected {name} in the record's dtype {places.state[name].dtype}, got {value.dtype}; load the "
                "state of the same optimizer"
            )


def _check_element_state(optimizer: str, key: str, value: Tensor, view: Tensor) -> None:
    if value.shape != view.shape or value.dtype != view.dtype:
        raise OffloadError(
            f"{optimizer} keeps {key!r} as {tuple(value.shape)} {value.dtype}, but the record has space for "
            f"{tuple(view.shape)} {view.dtype}; create a new OffloadedOptimizer"
        )


def _check_shard_state(optimizer: str, key: str, value: Any) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise OffloadError(
            f"{optimizer} keeps a state {key!r} with {value.numel():,} elements, but the records have no space for this state; "
            f"create a new OffloadedOptimizer after changing the optimizer's options"
        )
