"""What memory is taken for: said by whoever takes it, heard by who counts it (`memory.device`).

    with taking("weights", parameters):
        buffer = torch.empty(length)

It costs next to nothing where nobody counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from torch import nn

Kind = Literal["weights", "gradients", "masters and states", "activations"]


@dataclass(frozen=True)
class Purpose:
    """Memory of one kind, for some of a model's parameters where that can be said.

    `ranks` have it in common: it is there once for all of them.
    """

    kind: Kind
    parameters: Sequence[nn.Parameter] = ()
    ranks: int = 1


_ACTIVATIONS = Purpose("activations")

_current: ContextVar[Purpose] = ContextVar("purpose")


def current_purpose() -> Purpose:
    """What this thread takes memory for; activations, unless something else has been said."""
    return _current.get(_ACTIVATIONS)


@contextmanager
def taking(kind: Kind, parameters: Sequence[nn.Parameter] = (), *, ranks: int = 1) -> Iterator[None]:
    """Within it, this thread takes memory for that."""
    token = _current.set(Purpose(kind, parameters, ranks))
    try:
        yield
    finally:
        _current.reset(token)
