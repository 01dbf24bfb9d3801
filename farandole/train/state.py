"""All tensors that a run goes on from, by name, in the pieces that this rank has of them.

    model.NAME              a parameter, flat: what the optimizer updates
    optimizer.NAME/KEY      a state that the optimizer keeps of it (`exp_avg`, ...); numbers are whole
    random.rankN            the generator of a rank, random.cuda.rankN that of its accelerator
    compression.rankN.KEY   what compression remembers on a rank

What several ranks hold alike has the same name on each, and is written once.  States that are kept elsewhere
(`parallel.offload`) pass through memory one bucket at a time, when they are saved and when they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES

from farandole.train.engine import Engine
from farandole.train.offloaded_state import offloaded_state
from farandole.train.saved_piece import Piece, SavedPiece
from farandole.train.state_names import empty_as, pieces, states_by_name, values_by_piece

State = dict[str, Tensor | Piece]


def state_of(engine: Engine, rank: int) -> State:
    """The state of `engine` as it is; its tensors are the engine's own."""
    state: State = {}
    values_of = values_by_piece(engine)
    for name, parameter, piece, start in pieces(engine):
        state[f"model.{name}"] = SavedPiece(values_of[piece], start, parameter.numel())
        for key, value in engine.optimizer.state.get(piece, {}).items():
            whole = value.dim() == 0
            state[f"optimizer.{name}/{key}"] = (
                value if whole else SavedPiece(value.view(-1), start, parameter.numel())
            )
    state |= offloaded_state(engine)
    state[f"random.rank{rank}"] = torch.get_rng_state()
    if engine.device.type == "cuda":
        state[f"random.cuda.rank{rank}"] = torch.cuda.get_rng_state(engine.device)
    for key, value in engine.replica.compression_state().items():
        state[f"compression.rank{rank}.{key}"] = value
    return state


def room_for(engine: Engine, rank: int, saved: Mapping[str, STORAGE_TYPES]) -> State:
    """Where to load what was `saved`: weights into the engine's own, the rest into new tensors.

    What the checkpoint has no part of for this rank, as the generator of one that it did not have, is left out.
    """
    names = {} if engine.replica.offloaded else states_by_name(saved)
    room: State = {}
    values_of = values_by_piece(engine)
    for name, parameter, piece, start in pieces(engine):
        room[f"model.{name}"] = SavedPiece(values_of[piece], start, parameter.numel())
        for key in names.get(name, ()):
            entry = f"optimizer.{name}/{key}"
            values = empty_as(saved[entry], piece.numel())
            room[entry] = values if values.dim() == 0 else SavedPiece(values, start, parameter.numel())
    own = (f"random.rank{rank}", f"random.cuda.rank{rank}")
    for entry, description in saved.items():
        if entry in own or entry.startswith(f"compression.rank{rank}."):
            room[entry] = empty_as(description, None)
    if engine.device.type != "cuda":
        room.pop(own[1], None)
    return room


def restore(engine: Engine, rank: int, loaded: State) -> None:
    """Have `engine` go on from what was loaded into the room that `room_for` made."""
    for name, _, piece, _ in pieces(engine):
        prefix = f"optimizer.{name}/"
        for entry, found in loaded.items():
            if entry.startswith(prefix):
                value = found.values.view_as(piece) if isinstance(found, Piece) else found
                engine.optimizer.state[piece][entry.removeprefix(prefix)] = value.to(piece.device)
    engine.replica.publish()
    remembered = f"compression.rank{rank}."
    engine.replica.load_compression(
        {
            entry.removeprefix(remembered): value
            for entry, value in loaded.items()
            if entry.startswith(remembered) and isinstance(value, Tensor)
        }
    )
    generator = loaded.get(f"random.rank{rank}")
    if isinstance(generator, Tensor):
        torch.set_rng_state(generator)
    generator = loaded.get(f"random.cuda.rank{rank}")
    if isinstance(generator, Tensor):
        torch.cuda.set_rng_state(generator, engine.device)
