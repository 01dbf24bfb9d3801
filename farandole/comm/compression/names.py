"""The compression names used in configurations."""

from __future__ import annotations

import torch

from farandole.comm.compression.base import Compression
from farandole.comm.compression.codecs import Cast, Int8
from farandole.comm.compression.low_rank import PowerSGD
from farandole.comm.compression.sparse import TopK

_NAMED: dict[str, Compression | None] = {
    "none": None,
    "bf16": Cast(torch.bfloat16),
    "fp16": Cast(torch.float16),
    "int8": Int8(),
    "topk": TopK(),
    "powersgd": PowerSGD(),
}


def compression_named(name: str) -> Compression | None:
    """Return the compression with this name and default settings.

    Raises:
        ValueError: if the name is unknown.
    """
    if name not in _NAMED:
        raise ValueError(f"expected the compression to be one of {', '.join(_NAMED)}, got {name!r}")
    return _NAMED[name]
