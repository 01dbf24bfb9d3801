"""A torch optimizer whose state lives elsewhere, and which steps one unit of a model at a time.

The state of an optimizer is most of what training keeps: for AdamW in mixed precision 12 bytes per parameter (master
weights and two averages) beside 2 of weights and 2 of gradients (Rajbhandari et al., 2020, "ZeRO", section 3.1).
It is used once per step, element by element, so it can live in the memory of the host (Ren et al., 2021,
"ZeRO-Offload") or on a disk (Rajbhandari et al., 2021, "ZeRO-Infinity") and pass through a few buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farandole.data.wording import counted
from farandole.memory.budget import Bandwidth, Budget
from farandole.memory.errors import OffloadError
from farandole.memory.home import StateHome
from farandole.memory.unit_records import PiecePlaces, lay_out, only, state_of_group

_IN_RECORD = object()
"""Stands in `_kept` for a tensor that is in the record."""


@dataclass(frozen=True)
class PieceState:
    """One piece as a checkpoint has it: weights, and state by name (tensors of its length, and single numbers).

    The state of a piece that has not been stepped yet is empty.
    """

    weights: Tensor
    state: dict[str, Any]


class OffloadedOptimizer:
    """Steps `optimizer`, any one of torch's interface that works element by element, unit by unit.

    `units` divides its parameters ("pieces": 1-D, floating point, on the CPU) into records, which `home` makes a
    place for when it is told their sizes in bytes: `MemoryHome`, or `partial(DiskHome, folder)`.  With `weights`
    a piece's values live in the record too, beside its state (the model then computes with other copies), and
    between the steps of its unit the parameter holds NaN, without using memory; its gradient can be set at any
    time.  Without, values stay in memory and only the state moves.

    What `optimizer` has already, values and state, is taken over.  `fused` is switched on in groups that leave it
    open: it updates in one pass what otherwise takes several.  Results are bit for bit those of `optimizer` itself.
    Schedulers change `optimizer.param_groups` as ever.

    Raises `OffloadError` if the state is not one number per element or piece, or if `home` has no room.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[Sequence[nn.Parameter]],
        home: Callable[[Sequence[int]], StateHome],
        weights: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self._step_all = optimizer.step  # whoever replaces `optimizer.step` by a call of ours means this one
        self.units = [list(unit) for unit in units]
        self.weights = weights
        self._group_of = _check(optimizer, self.units)
        for group in optimizer.param_groups:
            _prefer_fused(group)
        per_group = [state_of_group(optimizer, index) for index in range(len(optimizer.param_groups))]
        self._places: list[list[PiecePlaces]] = []
        sizes = []
        for unit in self.units:
            places, nbytes = lay_out(unit, [per_group[self._group_of[piece]] for piece in unit], weights)
            self._places.append(places)
            sizes.append(nbytes)
        self._kept: dict[Tensor, dict[str, Any]] = {}
        self._broken: set[int] = set()
        self.home = home(sizes)
        try:
            self._move_in()
        except BaseException:
            self.home.close()
            raise

    def step(
        self, before: Callable[[int], None] | None = None, after: Callable[[int], None] | None = None
    ) -> None:
        """Step every unit; pieces whose `grad` is None are left as they are, as ever.

        `before(unit)` may set the gradients of a unit; `after(unit)` sees its new values in the pieces, and copies
        them where the model wants them.  Without `before`, units in which no piece has a gradient are not read.

        If this raises or is interrupted, some units are stepped and others not: the next step is refused until
        `load` has been called for every unit.
        """
        if self._broken:
            raise OffloadError(
                f"the last step was broken off between units; load {counted(len(self._broken), 'unit')} from a "
                f"checkpoint (next: unit {min(self._broken)}) before the next step"
            )
        order = [
            index
            for index, unit in enumerate(self.units)
            if unit and (before is not None or any(piece.grad is not None for piece in unit))
        ]
        changed: dict[int, dict[str, Any]] = {}

        def work(index: int, record: Tensor) -> None:
            self._step_unit(index, record, changed, before, after)

        self.home.update(order, work)
        for index, group in changed.items():  # an optimizer may count steps in its groups
            self.optimizer.param_groups[index].update(group)
        self._broken = set()

    def prefetch(self) -> None:
        """Start to read the units that the next step begins with."""
        for index in range(len(self.units)):
            if not self.home.prefetch(index):
                return

    def kept(self, unit: int) -> list[dict[str, Any]]:
        """For each piece of `unit` its states by name: the type of what is one number per element, else the value."""
        return [
            {
                key: places.state[key].dtype if value is _IN_RECORD else value
                for key, value in self._kept.get(piece, {}).items()
            }
            for piece, places in zip(self.units[unit], self._places[unit], strict=True)
        ]

    def saved(self, first: int = 0) -> Iterator[tuple[int, list[PieceState]]]:
        """Each unit from `first` on and the state of its pieces, to be copied: valid until the next unit."""
        for index, record in self.home.visit(range(first, len(self.units))):
            yield index, [self._piece(index, at, record) for at in range(len(self.units[index]))]

    def load(self, unit: int, pieces: Sequence[PieceState]) -> None:
        """Bring `unit` to the state that `saved` gave of it.  Raises ValueError where that does not fit."""
        if not 0 <= unit < len(self.units):
            raise IndexError(f"unit {unit}: there are {counted(len(self.units), 'unit')}, counted from 0")
        if len(pieces) != len(self.units[unit]):
            raise ValueError(
                f"unit {unit} has {counted(len(self.units[unit]), 'piece')}, {len(pieces)} given"
            )
        for at, piece in enumerate(pieces):
            _check_fits(f"unit {unit}, piece {at}", self._places[unit][at], self.units[unit][at], piece)
        own = [PieceState(piece.weights, _own_numbers(piece.state)) for piece in pieces]
        self.home.fill([unit], lambda _, record: self._put(unit, record, own))
        self._broken.discard(unit)

    def budget(self, bandwidth: Bandwidth | None = None) -> Budget:
        """What a step in which every unit has gradients costs, in bytes and, with a `bandwidth`, in time."""
        return Budget.of_records(self.home.record_bytes, bandwidth)

    def close(self) -> None:
        """Give the space back; may be called again.  Values kept in records are gone with it."""
        self.home.close()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _move_in(self) -> None:
        """Put what pieces and optimizer hold into records; only when all is there, let go of it."""

        def work(index: int, record: Tensor) -> None:
            unit = self.units[index]
            states = [PieceState(piece.data, dict(self.optimizer.state.get(piece, {}))) for piece in unit]
            self._put(index, record, states)

        self.home.fill(range(len(self.units)), work)
        self.home.flush()
        for unit in self.units:
            for piece in unit:
                self.optimizer.state.pop(piece, None)
                self._detach(piece)

    def _put(self, index: int, record: Tensor, pieces: Sequence[PieceState]) -> None:
        for piece, places, given in zip(self.units[index], self._places[index], pieces, strict=True):
            values = piece.data if places.weights is None else places.weights.of(record)
            values.copy_(given.weights)
            self._keep(piece, places, record, given.state)

    def _keep(self, piece: nn.Parameter, places: PiecePlaces, record: Tensor, state: dict[str, Any]) -> None:
        """Put `state` where it belongs: what is one number per element into the record."""
        kept: dict[str, Any] = {}
        name = type(self.optimizer).__name__
        for key, value in state.items():
            if key in places.state and value is not None:
                view = places.state[key].of(record)
                if (
                    value.data_ptr() != view.data_ptr()
                ):  # the first step of a piece, or a new tensor each time
                    _check_element_state(name, key, value, view)
                    view.copy_(value)
                kept[key] = _IN_RECORD
            else:
                _check_piece_state(name, key, value)
                kept[key] = value
        if kept:
            self._kept[piece] = kept
        else:
            self._kept.pop(piece, None)

    def _state(self, piece: nn.Parameter, places: PiecePlaces, record: Tensor) -> dict[str, Any]:
        return {
            key: places.state[key].of(record) if value is _IN_RECORD else value
            for key, value in self._kept.get(piece, {}).items()
        }

    def _piece(self, index: int, at: int, record: Tensor) -> PieceState:
        piece, places = self.units[index][at], self._places[index][at]
        values = piece.data if places.weights is None else places.weights.of(record)
        return PieceState(values, self._state(piece, places, record))

    def _detach(self, piece: nn.Parameter) -> None:
        if self.weights:
            piece.data = piece.new_full((1,), torch.nan).expand(piece.shape)

    def _step_unit(
        self,
        index: int,
        record: Tensor,
        changed: dict[int, dict[str, Any]],
        before: Callable[[int], None] | None,
        after: Callable[[int], None] | None,
    ) -> None:
        unit, places = self.units[index], self._places[index]
        try:
            for piece, place in zip(unit, places, strict=True):
                if place.weights is not None:
                    piece.data = place.weights.of(record)
            if before is not None:
                before(index)
            # A piece in its first step has no state yet, and torch's fused SGD wants all of a group alike.
            groups: dict[tuple[int, bool], dict[str, Any]] = {}
            for piece in unit:
                number = self._group_of[piece]
                group = {**self.optimizer.param_groups[number], "params": []}
                groups.setdefault((number, piece in self._kept), group)["params"].append(piece)
            pairs = list(zip(unit, places, strict=True))
            state: dict[Tensor, dict[str, Any]] = {
                p: held for p, place in pairs if (held := self._state(p, place, record))
            }
            self._broken = set(range(len(self.units)))  # until all are through
            with only(self.optimizer, [groups[key] for key in sorted(groups)], state):
                self._step_all()
                for piece, place in pairs:
                    self._keep(piece, place, record, self.optimizer.state.get(piece, {}))
            for (number, _), group in groups.items():
                changed[number] = {key: value for key, value in group.items() if key != "params"}
            if after is not None:
                after(index)
        finally:
            for piece in unit:
                self._detach(piece)


def _check(optimizer: Optimizer, units: list[list[nn.Parameter]]) -> dict[Tensor, int]:
    """The group of every piece.  Raises ValueError where `units` do not divide the optimizer's parameters."""
    group_of = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    left = set(group_of)
    for index, unit in enumerate(units):
        for at, piece in enumerate(unit):
            if piece not in left:
                why = (
                    "is in a unit already"
                    if piece in group_of
                    else f"is not in the {type(optimizer).__name__}"
                )
                raise ValueError(f"unit {index}, piece {at} {why}: units divide the optimizer's parameters")
            left.discard(piece)
            if piece.dim() != 1 or not piece.is_floating_point() or piece.device.type != "cpu":
                raise ValueError(
                    f"unit {index}, piece {at} is {tuple(piece.shape)} {piece.dtype} on {piece.device}; a piece is a "
                    f"1-D floating point parameter on the CPU, such as a flattened fp32 copy"
                )
    if left:
        raise ValueError(
            f"{counted(len(left), 'parameter')} of the optimizer in no unit: units divide all of them"
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
    """`state` with copies of what is counted per piece: a step would change it where it came from."""
    return {k: v.clone() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in state.items()}


def _check_fits(what: str, places: PiecePlaces, piece: nn.Parameter, given: PieceState) -> None:
    per_element = {name: given.state[name] for name in places.state if given.state.get(name) is not None}
    for name, value in {"weights": given.weights, **per_element}.items():
        if not isinstance(value, Tensor) or value.shape != piece.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{what}: {name} is {found}, the piece {tuple(piece.shape)}")
    for name, value in per_element.items():
        if value.dtype != places.state[name].dtype:
            raise ValueError(f"{what}: {name} is {value.dtype}, the record holds {places.state[name].dtype}")


def _check_element_state(optimizer: str, key: str, value: Tensor, view: Tensor) -> None:
    if value.shape != view.shape or value.dtype != view.dtype:
        raise OffloadError(
            f"{optimizer} keeps {key!r} as {tuple(value.shape)} {value.dtype}, where the record has room for "
            f"{tuple(view.shape)} {view.dtype}"
        )


def _check_piece_state(optimizer: str, key: str, value: Any) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise OffloadError(
            f"{optimizer} keeps {key!r} of {value.numel():,} elements, for which records have no room: it did not "
            f"when they were laid out; after changing its options make a new OffloadedOptimizer"
        )
