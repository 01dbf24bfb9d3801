"""States of an optimizer that are kept elsewhere, in checkpoints: one bucket of them in memory at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from farandole.memory.offloaded_optimizer import PieceState
from farandole.memory.unit_reader import UnitReader
from farandole.train.engine import Engine
from farandole.train.saved_piece import PieceLoadPlanner, SavedPiece, StoredPiece
from farandole.train.state_names import empty_as, pieces, states_by_name, values_by_piece

_Place = tuple[str, int, int]
"""Of a piece: the name of its parameter, where it begins in it, and the parameter's number of elements."""


def offloaded_state(engine: Engine) -> dict[str, Tensor | StoredPiece]:
    """What offloaded optimizers keep, by name; pieces are brought when they are written, in this order."""
    places = _places(engine)
    state: dict[str, Tensor | StoredPiece] = {}
    for update in engine.replica.offloaded:
        reader = UnitReader(update.state)
        for unit, members in enumerate(update.state.units):
            for at, (piece, kept) in enumerate(zip(members, update.state.kept(unit), strict=True)):
                name, start, count = places[piece]
                for key, value in kept.items():
                    entry = f"optimizer.{name}/{key}"
                    if isinstance(value, torch.dtype):
                        load = partial(_load, reader, unit, at, key)
                        state[entry] = StoredPiece(load, value, piece.numel(), start, count)
                    elif isinstance(value, Tensor):
                        state[entry] = value
    return state


def load_offloaded(engine: Engine, folder: Path) -> None:
    """Have offloaded optimizers go on from what checkpoint files in `folder` have of their pieces."""
    places, values_of = _places(engine), values_by_piece(engine)
    for update in engine.replica.offloaded:
        for unit, members in enumerate(update.state.units):
            found = _read(folder, [places[piece] for piece in members], members)
            update.state.load(
                unit, [PieceState(values_of[p], dict(s)) for p, s in zip(members, found, strict=True)]
            )


def _read(folder: Path, places: list[_Place], members: list[nn.Parameter]) -> list[dict[str, Tensor]]:
    """The states of some pieces, from the files of a checkpoint; each rank reads by itself."""
    reader = FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    keys = states_by_name(saved)
    room: dict[str, Tensor | SavedPiece] = {}
    found: list[dict[str, Tensor]] = []
    for (name, start, count), piece in zip(places, members, strict=True):
        states: dict[str, Tensor] = {}
        for key in keys.get(name, ()):
            entry = f"optimizer.{name}/{key}"
            states[key] = empty_as(saved[entry], piece.numel())
            room[entry] = states[key] if states[key].dim() == 0 else SavedPiece(states[key], start, count)
        found.append(states)
    if room:
        dcp.load(room, storage_reader=reader, planner=PieceLoadPlanner(), no_dist=True)
    return found


def _load(reader: UnitReader, unit: int, at: int, key: str) -> Tensor:
    value: Tensor = reader.states(unit)[at].state[key]
    return value


def _places(engine: Engine) -> dict[nn.Parameter, _Place]:
    return {piece: (name, start, parameter.numel()) for name, parameter, piece, start in pieces(engine)}
