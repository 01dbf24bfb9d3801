"""The names of a run's tensors, and what checkpoints say of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from farandole.train.engine import Engine


def pieces(engine: Engine) -> Iterator[tuple[str, nn.Parameter, nn.Parameter, int]]:
    """(name, parameter, piece, start) of what this rank updates."""
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    for parameter, piece, start in engine.replica.pieces():
        yield names[id(parameter)], parameter, piece, start


def values_by_piece(engine: Engine) -> dict[nn.Parameter, Tensor]:
    """Return the values of each piece, flat; for a piece that is kept elsewhere, the copy that the model computes with."""
    found = dict(engine.replica.piece_values())
    for piece, values in found.items():
        assert values.dtype is piece.dtype  # the weights of a run have the type of its optimizer
    return found


def states_by_name(saved: Mapping[str, STORAGE_TYPES]) -> dict[str, list[str]]:
    """For each parameter the states of its optimizer that were saved."""
    names: dict[str, list[str]] = {}
    for entry in saved:
        if entry.startswith("optimizer."):
            name, _, key = entry.removeprefix("optimizer.").rpartition("/")
            names.setdefault(name, []).append(key)
    return names


def empty_as(description: STORAGE_TYPES, length: int | None) -> Tensor:
    """Room for a tensor as described, or, unless it is a number, for `length` elements of it."""
    if not isinstance(description, TensorStorageMetadata):
        raise TypeError(f"expected a tensor, found {type(description).__name__}")
    shape = description.size if length is None or not description.size else (length,)
    return torch.empty(shape, dtype=description.properties.dtype)
