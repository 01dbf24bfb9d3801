"""Wrap calls to a module without changing parameter and submodule names.

    wrap_calls(block, wrapper)          # block(x) calls wrapper(block, call, (x,), {}); call(x) is the original call
    unwrap_calls(block, type(wrapper))

The module's class is replaced by a subclass of the same name, as in FSDP2: `isinstance`, parameters,
`state_dict` and hooks do not change, and the module's hooks run inside the wrapper.  Copies and pickles of the
module have the original class.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, TypeVar

from torch import nn

_WRAPPERS = "_farandole_wrappers"


class Wrapper(Protocol):
    """A callable that wraps calls to a module."""

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of the module's call, normally `call(*args, **kwargs)`."""


WrapperT = TypeVar("WrapperT", bound=Wrapper)


class _Wrapped(nn.Module):
    """A mixin that passes calls to a module through the wrappers in `_WRAPPERS`."""

    _plain: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super().__call__
        # The last wrapper is the outermost.  A slice of an nn.Sequential has this class but no wrappers.
        for wrapper in self.__dict__.get(_WRAPPERS, ()):
            call = partial(_pass_through, wrapper, self, call)
        return call(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        state = reduced[2]
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != _WRAPPERS}
        # the form that older pickle protocols use for `object.__new__(plain)`; it loads without this package
        return (copyreg._reconstructor, (self._plain, object, None), state, *reduced[3:])  # type: ignore[attr-defined]


def _pass_through(
    wrapper: Wrapper, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return wrapper(module, call, args, kwargs)


@cache
def _wrapped(plain: Any) -> Any:
    """Return the subclass of `plain` whose calls run through wrappers."""
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_Wrapped, plain), {**names, "_plain": plain})


def wrap_calls(module: nn.Module, wrapper: Wrapper) -> None:
    """Add `wrapper` as the outermost wrapper of calls to `module`."""
    if not isinstance(module, _Wrapped):
        plain: Any = type(module)
        module.__class__ = _wrapped(plain)
        module.__dict__[_WRAPPERS] = []
    module.__dict__[_WRAPPERS].append(wrapper)


def unwrap_calls(module: nn.Module, wrapper: type[Wrapper] | Wrapper) -> bool:
    """Remove `wrapper` or, given a type, all wrappers of this type; return whether any was removed."""
    before = module.__dict__.get(_WRAPPERS, [])
    kind = wrapper if isinstance(wrapper, type) else None
    after = [one for one in before if not (isinstance(one, kind) if kind else one is wrapper)]
    if after:
        module.__dict__[_WRAPPERS] = after
    elif isinstance(module, _Wrapped):
        del module.__dict__[_WRAPPERS]
        plain: Any = module._plain
        module.__class__ = plain
    return len(after) < len(before)


def wrapper_of(module: nn.Module, kind: type[WrapperT]) -> WrapperT | None:
    """Return the wrapper of type `kind` around `module`, or None."""
    return next((one for one in module.__dict__.get(_WRAPPERS, []) if isinstance(one, kind)), None)
