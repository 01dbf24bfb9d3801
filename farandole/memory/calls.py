"""Doing something around the calls of a module, without a change to its names, and undoing it.

    surround(block, around)     # block(x) is now around(block, call, (x,), {}), where call(x) is what it was
    release(block, type(around))

The class of the module is exchanged for a subclass of the same name, as FSDP2 does it: `isinstance`, parameters,
`state_dict` and hooks stay as they are, and what surrounds the call sees the hooks of the module run inside it.  A copy
or a pickle of the module is one of the plain module.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, TypeVar

from torch import nn

_AROUND = "_farandole_around"


class Around(Protocol):
    """What is done around a call: returns what the caller gets, normally `call(*args, **kwargs)`."""

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called in place of `call`."""


AroundT = TypeVar("AroundT", bound=Around)


class _Surrounded(nn.Module):
    """Goes before a module class among the bases: its calls lead through what is in `_AROUND`."""

    _plain: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super().__call__
        # the last one put there is the outermost; a slice of an nn.Sequential is of its class, and has none
        for around in self.__dict__.get(_AROUND, ()):
            call = partial(_pass_through, around, self, call)
        return call(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        state = reduced[2]
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != _AROUND}
        # What older protocols make of `object.__new__(plain)`: whoever reads it needs nothing of this package.
        return (copyreg._reconstructor, (self._plain, object, None), state, *reduced[3:])  # type: ignore[attr-defined]


def _pass_through(
    around: Around, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return around(module, call, args, kwargs)


@cache
def _surrounded(plain: Any) -> Any:
    """The subclass of module class `plain`."""
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_Surrounded, plain), {**names, "_plain": plain})


def surround(module: nn.Module, around: Around) -> None:
    """From now on calls of `module` go through `around`, outside of what surrounds them already."""
    if not isinstance(module, _Surrounded):
        plain: Any = type(module)
        module.__class__ = _surrounded(plain)
        module.__dict__[_AROUND] = []
    module.__dict__[_AROUND].append(around)


def release(module: nn.Module, around: type[Around] | Around) -> bool:
    """Take away `around`, or all that are of that type; true if there was one."""
    before = module.__dict__.get(_AROUND, [])
    kind = around if isinstance(around, type) else None
    after = [one for one in before if not (isinstance(one, kind) if kind else one is around)]
    if after:
        module.__dict__[_AROUND] = after
    elif isinstance(module, _Surrounded):
        del module.__dict__[_AROUND]
        plain: Any = module._plain
        module.__class__ = plain
    return len(after) < len(before)


def surrounding(module: nn.Module, kind: type[AroundT]) -> AroundT | None:
    """What of type `kind` surrounds the calls of `module`."""
    return next((one for one in module.__dict__.get(_AROUND, []) if isinstance(one, kind)), None)
