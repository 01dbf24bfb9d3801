"""Every element of every parameter belongs to one server, and all servers store about the same number of bytes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.parallel.parameter_server.layout import PARTS_PER_SERVER, SMALLEST_BYTES, Packing, divide

SHAPES = st.lists(st.lists(st.integers(0, 300), max_size=2), min_size=1, max_size=8)
TYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@settings(deadline=None)
@given(SHAPES, st.integers(1, 5), st.booleans(), TYPES)
def test_division(shapes, servers, split, dtype):
    parameters = [
        torch.full(shape, float(index), dtype=dtype if index % 2 else torch.float32)
        for index, shape in enumerate(shapes)
    ]
    shares = divide(parameters, servers, split=split)
    assert len(shares) == servers
    for index, parameter in enumerate(parameters):
        mine = sorted(piece for share in shares for piece in share if piece.parameter == index)
        assert [piece.start for piece in mine] == [0, *(piece.stop for piece in mine[:-1])]
        assert mine[-1].stop == parameter.numel()
        assert all(piece.whole for piece in mine) == (len(mine) == 1) and (split or len(mine) == 1)
    loads = [
        sum((piece.stop - piece.start) * parameters[piece.parameter].itemsize for piece in share)
        for share in shares
    ]
    if split:
        limit = max(SMALLEST_BYTES, sum(loads) / servers / PARTS_PER_SERVER)
        assert max(loads) - min(loads) <= limit


@settings(deadline=None)
@given(SHAPES, st.integers(1, 3))
def test_packing_and_back(shapes, servers):
    parameters = [
        torch.randn(shape) if i % 3 else torch.randn(shape).double() for i, shape in enumerate(shapes)
    ]
    copies = [torch.full_like(parameter, torch.nan) for parameter in parameters]
    for share in divide(parameters, servers):
        packing = Packing(share, parameters)
        views = packing.views(packing.buffers())
        for piece, view in zip(packing.pieces, views, strict=True):
            view.copy_(packing.part(piece, parameters[piece.parameter]))
            if piece.whole:
                assert view.shape == parameters[piece.parameter].shape
            copies[piece.parameter].view(-1)[piece.start : piece.stop] = view.view(-1)
    for copy, parameter in zip(copies, parameters, strict=True):
        assert torch.equal(copy, parameter)
