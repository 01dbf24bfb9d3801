"""Distribute parameters over servers, and pack each server's pieces into flat buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PARTS_PER_SERVER = 4
"""To balance the servers, tensors are split until none is larger than a server's share divided by this number."""

SMALLEST_BYTES = 1 << 16
"""Smaller tensors are not split, because additional messages would cost more than better balance saves."""

Buffers = dict[torch.dtype, Tensor]
"""Flat memory for the pieces of one server, one tensor per dtype."""


@dataclass(frozen=True, order=True)
class Piece:
    """The elements `start` to `stop` of a flattened parameter, or the whole parameter."""

    parameter: int
    start: int
    stop: int
    whole: bool


def divide(parameters: Sequence[Tensor], servers: int, *, split: bool = True) -> list[list[Piece]]:
    """Return each server's pieces; all servers get about the same number of bytes.

    Pieces are assigned in descending order of size, each to the server with the fewest bytes.  If `split` is
    False, no tensors are split; non-contiguous tensors are never split.  Every rank computes the same result from
    the same parameters.
    """
    share = sum(parameter.nbytes for parameter in parameters) / servers
    limit = max(SMALLEST_BYTES, share / PARTS_PER_SERVER) if split and servers > 1 else math.inf
    pieces = []
    for index, parameter in enumerate(parameters):
        parts = max(1, math.ceil(parameter.nbytes / limit)) if parameter.is_contiguous() else 1
        bounds = [parameter.numel() * part // parts for part in range(parts + 1)]
        pieces += [
            Piece(index, start, stop, whole=parts == 1)
            for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
        ]
    taken: list[list[Piece]] = [[] for _ in range(servers)]
    loads = [0] * servers
    sizes = {piece: (piece.stop - piece.start) * parameters[piece.parameter].itemsize for piece in pieces}
    for piece in sorted(pieces, key=lambda piece: (-sizes[piece], piece)):
        lightest = loads.index(min(loads))
        taken[lightest].append(piece)
        loads[lightest] += sizes[piece]
    return [sorted(share) for share in taken]


class Packing:
    """The positions of one server's pieces in flat buffers.

    There is one buffer per dtype, in which the pieces are consecutive.
    """

    def __init__(self, pieces: Sequence[Piece], parameters: Sequence[Tensor]) -> None:
        self.pieces = list(pieces)
        self._places: list[tuple[torch.dtype, slice, tuple[int, ...]]] = []
        self._sizes: dict[torch.dtype, int] = {}
        for piece in self.pieces:
            parameter = parameters[piece.parameter]
            start = self._sizes.get(parameter.dtype, 0)
            stop = start + piece.stop - piece.start
            self._sizes[parameter.dtype] = stop
            shape = tuple(parameter.shape) if piece.whole else (piece.stop - piece.start,)
            self._places.append((parameter.dtype, slice(start, stop), shape))

    def buffers(self) -> Buffers:
        """Return new buffers filled with zeros."""
        return {dtype: torch.zeros(size, dtype=dtype) for dtype, size in self._sizes.items()}

    def views(self, buffers: Mapping[torch.dtype, Tensor]) -> list[Tensor]:
        """Return the pieces as views of the buffers; a whole parameter keeps its shape, other pieces are flat."""
        return [buffers[dtype][place].view(shape) for dtype, place, shape in self._places]

    def part(self, piece: Piece, tensor: Tensor) -> Tensor:
        """Return the elements of `piece`, given its parameter or a tensor with the same shape.

        The result is `tensor` itself if the piece is a whole parameter, and a flat tensor otherwise.
        """
        return tensor if piece.whole else tensor.reshape(-1)[piece.start : piece.stop]
