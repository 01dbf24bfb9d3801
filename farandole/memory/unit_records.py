"""What the record of a unit looks like: the weights and optimizer state of its pieces, one after another.

A unit is what is read, stepped and written at a time, such as a block of a model; its pieces are the 1-D parameters
that an optimizer sees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farandole.memory.errors import OffloadError

_ALIGNMENT = 64
"""Bytes.  Every tensor starts on a cache line."""

_TINY = 3
"""Elements of the piece on which an optimizer shows what it keeps."""


@dataclass(frozen=True)
class Place:
    """Where a 1-D tensor lies in a record."""

    start: int
    numel: int
    dtype: torch.dtype

    def of(self, record: Tensor) -> Tensor:
        """The tensor itself: a view of `record`, which is 1-D uint8."""
        return record[self.start : self.start + self.numel * self.dtype.itemsize].view(self.dtype)


@dataclass(frozen=True)
class PiecePlaces:
    """The places of one piece: its weights, if they are kept in the record, and its state by name."""

    weights: Place | None
    state: Mapping[str, Place]


def lay_out(
    pieces: Sequence[nn.Parameter], kept: Sequence[Mapping[str, torch.dtype]], weights: bool
) -> tuple[list[PiecePlaces], int]:
    """The places of `pieces`, which keep state of these names and types, and the bytes of the record."""
    end = 0

    def place(numel: int, dtype: torch.dtype) -> Place:
        nonlocal end
        start, end = end, end + -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return Place(start, numel, dtype)

    places = []
    for piece, names in zip(pieces, kept, strict=True):
        own = place(piece.numel(), piece.dtype) if weights else None
        places.append(PiecePlaces(own, {name: place(piece.numel(), names[name]) for name in names}))
    return places, end


@contextmanager
def only(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]]
) -> Iterator[None]:
    """Have `optimizer` know nothing but `groups` and their `state`, which it finds in `optimizer.state`."""
    kept = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = groups, defaultdict(dict, state)
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = kept


def state_of_group(optimizer: Optimizer, index: int) -> dict[str, torch.dtype]:
    """What `optimizer` keeps for each element of a piece in group `index`: names and types.

    Taken from the state that it has; if it has none, from a step on a piece of three elements.  Raises
    `OffloadError` if that cannot be done, or gives state that is neither one number per piece nor one per element.
    """
    group = optimizer.param_groups[index]
    pieces = [piece for piece in group["params"] if optimizer.state.get(piece)]
    name = type(optimizer).__name__
    if pieces:
        piece = max(pieces, key=torch.Tensor.numel)
        found = optimizer.state[piece]
    elif group["params"]:
        piece = nn.Parameter(torch.zeros(_TINY, dtype=group["params"][0].dtype, device="cpu"))
        piece.grad = torch.zeros_like(piece)
        with only(optimizer, [{**group, "params": [piece]}], {}):
            try:
                optimizer.step()
            except Exception as error:
                raise OffloadError(
                    f"{name} cannot step one 1-D piece at a time ({type(error).__name__}: {error}); optimizers that "
                    f"work element by element can, such as AdamW, Adam and SGD"
                ) from error
            found = optimizer.state[piece]
    else:
        return {}
    tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    for key, value in tensors.items():
        if value.shape != piece.shape and value.numel() != 1:
            raise OffloadError(
                f"{name} keeps {key!r} of shape {tuple(value.shape)} for a piece of {piece.numel()} elements; only "
                f"state of one number per element or per piece can be kept in records"
            )
    return {key: value.dtype for key, value in tensors.items() if value.shape == piece.shape}
