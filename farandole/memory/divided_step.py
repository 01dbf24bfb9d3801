"""Divide a step of a torch optimizer into parts, each of which updates some of the parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SEPARATE = ("param_groups", "state", *_HOOKS)
"""The attributes that differ between the parts of a step."""


def replace_step(optimizer: Optimizer, update: Callable[[], None]) -> None:
    """Replace `optimizer.step` with a method that calls the closure and then `update`.

    Step hooks are called once per step.
    """

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]  # checked by schedulers that were created earlier
        with torch.enable_grad():
            loss = None if closure is None else closure()
        update()
        return loss

    hooked: Any = Optimizer.profile_hook_step(step)
    # schedulers mark the `step` that they have replaced, and expect a bound method
    vars(hooked).update({**getattr(optimizer.step, "__dict__", {}), **vars(hooked)})
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]


@contextmanager
def divided_step(optimizer: Optimizer, *, keep: bool = True) -> Iterator[Callable[[], None]]:
    """Yield a function that runs one part of a step: it updates the parameters in the current `param_groups`.

    Step hooks are not called.  Some optimizers count their steps in an attribute.  Therefore each part starts with the
    attribute values from before the step.  Only numbers, one-element tensors, strings, None, and containers of these
    types are restored.

    Args:
        keep: whether the attributes keep the values of the last part when the context exits.  After an exception, the
            values from before the step are always restored.
    """
    cls: Any = type(optimizer)
    # torch wraps the method of every optimizer class, for hooks and the profiler
    plain = cls.step.__wrapped__ if getattr(cls.step, "hooked", False) else cls.step
    before = copy.deepcopy(_plain_attributes(optimizer))
    hooks = {name: vars(optimizer)[name] for name in _HOOKS}
    # a `step` that calls `super().step()` would call the hooks
    vars(optimizer).update({name: OrderedDict() for name in _HOOKS})

    def step_part() -> None:
        _restore(optimizer, before)
        plain(optimizer)

    try:
        yield step_part
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            _restore(optimizer, before)
        vars(optimizer).update(hooks)


def _restore(optimizer: Optimizer, before: dict[str, Any]) -> None:
    current = _plain_attributes(optimizer)
    for name in current.keys() - before.keys():
        delattr(optimizer, name)
    changed = {name: value for name, value in before.items() if name not in current or current[name] != value}
    vars(optimizer).update(copy.deepcopy(changed))


def _plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {k: v for k, v in vars(optimizer).items() if k not in _SEPARATE and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return _is_plain([*value, *value.values()])
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_number or isinstance(value, int | float | complex | str | None)
